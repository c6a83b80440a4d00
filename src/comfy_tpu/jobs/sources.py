"""Job files, read line by line: JSON lines, CSV with a header, or a prompt a line.

A line that cannot be read becomes an `InvalidLine` with its number, and the others go on.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, get_args

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.json_input import parse_json

Format = Literal["jsonl", "csv", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)

STANDARD_INPUT = "-"
_SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".txt": "text"}
LINE_MAX = 2**20
"""Characters of a line. A prompt is shorter, and a file of another kind may have no line breaks at all."""


@dataclasses.dataclass(frozen=True)
class Line:
    number: int
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class InvalidLine:
    number: int
    reason: str


@contextlib.contextmanager
def open_jobs(place: str, kind: str | None = None) -> Iterator[Iterator[Line | InvalidLine]]:
    """The lines of a file, of an fsspec address or of standard input ("-"). `kind` None: by the name's suffix."""
    if kind is not None and kind not in FORMATS:
        raise InvalidValueError(f"format={kind} is unknown; choose from {', '.join(FORMATS)}", field="format")
    with _open(place) as file:
        yield read_jobs(file, kind or _SUFFIXES.get(Path(place).suffix.lower()))


def read_jobs(file: IO[bytes], kind: str | None) -> Iterator[Line | InvalidLine]:
    lines = _numbered_lines(file)
    if kind is None:  # standard input, or a name that does not tell
        first = next((item for item in lines if isinstance(item, InvalidLine) or item[1].strip()), None)
        if first is None:
            return iter(())
        lines = itertools.chain([first], lines)
        kind = "jsonl" if not isinstance(first, InvalidLine) and first[1].lstrip().startswith("{") else "text"
    if kind == "csv":
        return _read_csv(lines)
    return (line for line in map(_parse_json if kind == "jsonl" else _parse_text, lines) if line is not None)


_Numbered = tuple[int, str]


def _numbered_lines(file: IO[bytes]) -> Iterator[_Numbered | InvalidLine]:
    for number in itertools.count(1):
        raw = file.readline(LINE_MAX + 1)
        if not raw:
            return
        if len(raw) > LINE_MAX:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(LINE_MAX)
            yield InvalidLine(number, f"is longer than {LINE_MAX} bytes")
            continue
        try:
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield InvalidLine(number, f"is not UTF-8 text ({error.reason})")


def _parse_text(line: _Numbered | InvalidLine) -> Line | InvalidLine | None:
    if isinstance(line, InvalidLine):
        return line
    number, text = line
    return Line(number, {"prompt": text.strip()}) if text.strip() else None


def _parse_json(line: _Numbered | InvalidLine) -> Line | InvalidLine | None:
    if isinstance(line, InvalidLine):
        return line
    number, text = line
    if not text.strip():
        return None
    try:
        values = parse_json(text)
    except ValueError as error:
        return InvalidLine(number, f"is not JSON ({error})")
    if not isinstance(values, dict):
        return InvalidLine(number, f'is {type(values).__name__}, expected an object such as {{"prompt": "…"}}')
    return Line(number, values)


def _read_csv(lines: Iterable[_Numbered | InvalidLine]) -> Iterator[Line | InvalidLine]:
    """A quoted cell may hold line breaks; a job's number is that of its first line."""
    header: list[str] | None = None
    numbers: list[int] = []
    invalid: list[InvalidLine] = []

    def texts() -> Iterator[str]:
        for line in lines:
            if isinstance(line, InvalidLine):
                invalid.append(line)
                numbers.append(line.number)
                yield "\n"
            else:
                numbers.append(line[0])
                yield f"{line[1]}\n"

    rows = csv.reader(texts(), strict=True)
    while True:
        numbers.clear()
        invalid.clear()
        problem = ""
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            problem = f"is not CSV ({error})"
        if len(numbers) > 1 and (invalid or problem):
            problem = f"has a quote that does not end, or ends in line {numbers[-1]}"
        number = numbers[0]
        yield from invalid
        if problem:
            yield InvalidLine(number, problem)
            continue
        if not cells or not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            if "prompt" not in header:
                raise InvalidValueError(
                    f"jobs has the CSV columns {', '.join(header)}, and no prompt; give the columns names in the first "
                    "line",
                    field="jobs",
                )
        elif len(cells) > len(header):
            yield InvalidLine(number, f"has {len(cells)} cells and the header {len(header)}")
        else:
            yield Line(number, {name: cell for name, cell in zip(header, cells, strict=False) if cell.strip()})


@contextlib.contextmanager
def _open(place: str) -> Iterator[IO[bytes]]:
    if place == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    with _open_file(place) as file:
        yield file


def _open_file(place: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    try:
        if "://" in place:
            import fsspec  # type: ignore[import-untyped]

            remote: contextlib.AbstractContextManager[IO[bytes]] = fsspec.open(place, "rb").open()
            return remote
        path = Path(place)
        if path.exists() and not (path.is_file() or path.is_fifo()):
            raise InvalidValueError(f"jobs={place} is not a file; give a file with a job a line", field="jobs")
        return path.open("rb")
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, InvalidValueError):
            raise
        raise InvalidValueError(f"jobs={place} cannot be read ({error}); give another file", field="jobs") from error
