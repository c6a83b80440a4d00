"""The results of a benchmark: rows of raw samples, a run with its machine, a JSON file of runs."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.json_input import read_json
from comfy_tpu.pipeline.atomic import replacing, write_errors

SCHEMA = 1

Emit = Callable[["Row | str"], None]
"""Receives the rows of a part as they are measured, and remarks."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One computation by one peer. A row that failed has the reason, and no samples."""

    part: str
    what: str
    peer: str
    size: str = ""
    """width x height x frames; empty where there is none."""
    samples: tuple[float, ...] = ()
    """Seconds, warm-up excluded, as they were measured."""
    first_s: float | None = None
    """Seconds of the first call, with everything that is compiled or chosen in it."""
    flops: float | None = None
    """Operations of one call: a multiplication and an addition are two."""
    error: float | None = None
    """Of the output against float32: norm of the difference over norm of the reference."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failure: str | None = None
    traceback: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.part, self.what, self.peer, self.size)

    @property
    def measured(self) -> bool:
        """The part "accuracy" measures errors, and no time."""
        return bool(self.samples) or self.error is not None

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread_s(self) -> tuple[float, float] | None:
        return (min(self.samples), max(self.samples)) if self.samples else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s at the median."""
        return self.flops / self.median_s / 1e12 if self.flops and self.median_s else None

    def with_failure(self, error: BaseException) -> Row:
        """This row with the first line of the error as its reason, and no samples."""
        first_line = next(iter(str(error).strip().splitlines()), "")
        return dataclasses.replace(
            self,
            samples=(),
            failure=f"{type(error).__name__}: {first_line}"[:500],
            traceback=_format_traceback(error)[-8000:],
        )

    def to_json(self) -> dict[str, Any]:
        """With the median and the spread beside the samples they come from, for whoever reads the file."""
        return {**dataclasses.asdict(self), "median_s": self.median_s, "spread_s": self.spread_s, "tflops": self.tflops}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Row:
        values = {field.name: entry[field.name] for field in dataclasses.fields(cls) if field.name in entry}
        return cls(**{**values, "samples": tuple(values.get("samples", ()))})


def _format_traceback(error: BaseException) -> str:
    """With files named from their packages on: results are kept and shown, and a machine's paths mean nothing there."""
    text = "".join(traceback.format_exception(error))
    return re.sub(r'(?<=^  File ")/[^"]+', lambda found: _name_in_package(Path(found[0])), text, flags=re.MULTILINE)


def _name_in_package(file: Path) -> str:
    named = [file.relative_to(folder).as_posix() for folder in map(Path, sys.path) if file.is_relative_to(folder)]
    return min(named, key=len, default=file.name)


@dataclasses.dataclass(frozen=True)
class Run:
    """Rows measured together: only they are compared with each other."""

    date: str
    """ISO 8601, UTC."""
    command: str
    model: str
    """A hub id, "small:FAMILY", "demo" or a directory. Results before 2026-11-16 have "full" and "small", for the first
    published model and the first family."""
    dtype: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, str | None]
    rows: tuple[Row, ...] = ()
    mesh: str = "single"

    def with_row(self, row: Row) -> Run:
        """A later row of the same key takes the place of an earlier one, which was a first impression."""
        kept = [old for old in self.rows if old.key != row.key]
        return dataclasses.replace(self, rows=(*kept, row))

    def find(self, part: str, what: str | None = None, size: str | None = None) -> list[Row]:
        rows = (row for row in self.rows if row.part == part)
        return [row for row in rows if what in (None, row.what) and size in (None, row.size)]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.to_json() for row in self.rows]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Run:
        values = {field.name: entry[field.name] for field in dataclasses.fields(cls) if field.name in entry}
        return cls(**{**values, "rows": tuple(Row.from_json(row) for row in entry["rows"])})


def read_runs(path: Path) -> list[Run]:
    try:
        document = read_json(path)
        if document["schema"] != SCHEMA:
            raise InvalidValueError(
                f"{path} has schema {document['schema']}, expected {SCHEMA}; measure again with this version"
            )
        return [Run.from_json(entry) for entry in document["runs"]]
    except InvalidValueError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidValueError(
            f"{path} is not a file of benchmark results ({reason}); give one that `comfy-tpu bench --json` wrote"
        ) from error


def write_runs(path: Path, runs: Iterable[Run], *, field: str = "output") -> None:
    """`field`: as in `check_place`."""
    document = {"schema": SCHEMA, "runs": [run.to_json() for run in runs]}
    with replacing(path, field=field) as partial, write_errors(path, field=field):
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
