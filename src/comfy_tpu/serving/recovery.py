"""Opens the ledger of a server. Where it is damaged or gone, the finished files tell of the jobs that were done."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import av
import av.error

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.driver_lock import are_others_alive
from comfy_tpu.jobs.ledger import DamagedLedgerError, OutputFile
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.served_ledger import FinishedJob, ServedLedger, read_owners
from comfy_tpu.json_input import parse_json
from comfy_tpu.pipeline.image_files import IMAGE_ERRORS, open_image_file, quiet_images
from comfy_tpu.pipeline.media import find_metadata

logger = logging.getLogger(__name__)

_OUTPUT = re.compile(r"(?P<id>(?P<kind>video|image)_[0-9a-f]{24})(-(?P<number>\d+))?\.(mp4|png)")
"""Files of stages are not among them: a client that waited for one orders it again."""
_SETTINGS = frozenset(field.name for field in dataclasses.fields(GenerationSettings))


def open_ledger(path: Path, directory: Path) -> ServedLedger:
    """`directory`: of the finished files. Raises ComfyTpuError where another server has a damaged ledger open."""
    try:
        ledger = ServedLedger(path)
    except DamagedLedgerError as error:
        aside = _put_aside(path)
        reason = "the ledger %s is damaged (%s); it is %s now, and jobs that waited in it are lost"
        logger.error(reason, path, error.reason, aside)
        ledger = ServedLedger(path)
    try:
        if ledger.is_empty and (count := ledger.adopt(_find_finished(directory, read_owners(path)))):
            logger.warning("the ledger had no jobs; finished jobs found by their files: %d", count)
    except BaseException:
        ledger.close()
        raise
    return ledger


def _put_aside(path: Path) -> Path:
    """Renames the ledger with SQLite's files beside it, for whoever wants to repair it."""
    if are_others_alive(path):
        raise ComfyTpuError(f"the ledger {path} is damaged, and another server has it open; end that one first")
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    for suffix in ("-wal", "-shm", ""):  # the ledger last: without it the others would be another's
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def _find_finished(directory: Path, owners: dict[str, str]) -> Iterator[FinishedJob]:
    """In the order of their ids."""
    files = dict[str, list[tuple[int, Path]]]()
    for path in directory.iterdir():
        if (match := _OUTPUT.fullmatch(path.name)) is not None and path.is_file():
            if _opens(path):
                files.setdefault(match["id"], []).append((int(match["number"] or 0), path))
            else:
                logger.warning("%s is damaged: it is not among the finished jobs, and stays where it is", path)
    for id_, numbered in sorted(files.items()):
        paths = [path for _, path in sorted(numbered)]
        outputs = tuple(OutputFile(path.name, "", path.stat().st_size) for path in paths)
        yield FinishedJob(
            id_,
            "image" if id_.startswith("image") else "video",
            owners.get(id_, ""),
            Request(_read_values(paths[0])),
            outputs,
            paths[0].stat().st_mtime,
        )


def _opens(path: Path) -> bool:
    """Whether an image or a video can be opened, and has its end."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".png":
                with quiet_images():
                    open_image_file(file, ["PNG"]).verify()
                return True
            with av.open(file, format="mp4"):
                pass
            return {b"moov", b"mdat"} <= set(_read_boxes(file))
    except (av.error.FFmpegError, *IMAGE_ERRORS):
        return False


def _read_boxes(file: IO[bytes]) -> Iterator[bytes]:
    """The names of an MP4's boxes. Raises EOFError behind the end of the file: with its index in front, one that was
    cut off opens all the same."""
    end = file.seek(0, os.SEEK_END)
    place = file.seek(0)
    while place < end:
        size, name = struct.unpack(">I4s", file.read(8))
        if size == 1:  # more than 4 GiB
            (size,) = struct.unpack(">Q", file.read(8))
        place += size
        if size < 8 or place > end:
            raise EOFError
        file.seek(place)
        yield name


def _read_values(path: Path) -> dict[str, Any]:
    """The values of the request that a file was made for, as far as its metadata has them."""
    found = find_metadata(path)
    values: dict[str, Any] = {"model": str(found.get("model", "")), "prompt": str(found.get("prompt", ""))}
    with contextlib.suppress(ValueError):
        settings = parse_json(str(found.get("settings", "{}")))
        if isinstance(settings, dict):
            values |= {name: value for name, value in settings.items() if name in _SETTINGS}
    return values
