"""The names of a job's files inside the batch's directory, known before it runs: no two jobs may share one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from comfy_tpu.config import SECOND_PASS
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.frame_names import FRAME_NAME, number_videos

RESULTS = "results.jsonl"
OWN_DIRECTORY = ".comfy-tpu"
"""Inside the batch's directory, for the ledger and saved steps."""
_STEPS = f"{OWN_DIRECTORY}/steps/"
_STEPS_SUFFIX = ".safetensors"

_VIDEOS_MAX = 1000
"""More are refused when the job runs."""


def check_output_name(name: Any, field: str = "output") -> str:
    """The name, if it is that of a file inside a directory; raises InvalidValueError for any other."""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise InvalidValueError(f"{field}={name!r} is no name of a file", field=field)
    path = PurePosixPath(name)
    if not path.parts:
        raise InvalidValueError(f"{field}={name} is the batch's directory itself; give a name inside it", field=field)
    if path.is_absolute() or "://" in name or ".." in path.parts:
        raise InvalidValueError(f"{field}={name} is outside the batch's directory; give a name inside it", field=field)
    if path.parts[0] == OWN_DIRECTORY or name == RESULTS:
        raise InvalidValueError(f"{field}={name} is the batch's own; choose another name", field=field)
    return path.as_posix() + ("/" if name.endswith("/") else "")


def steps_name(id_: str, part: str = "") -> str:
    """The name of the file that the steps of a job are saved to. `part`: empty, or SECOND_PASS."""
    return f"{_STEPS}{id_}{f'.{part}' if part else ''}{_STEPS_SUFFIX}"


def list_steps_names(id_: str, values: Mapping[str, Any]) -> list[str]:
    """Of all files that the steps of a job with these values may be saved to."""
    return [steps_name(id_), *([steps_name(id_, SECOND_PASS)] if "upscale" in values else [])]


def find_steps_job(name: str) -> str | None:
    """The id of the job whose steps are in the file of this name; None where it is another kind of file."""
    if not (name.startswith(_STEPS) and name.endswith(_STEPS_SUFFIX)):
        return None
    return name.removeprefix(_STEPS).partition(".")[0]


def list_other_names(output: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that a job's files have beside `output`: of several videos, of frames, of the contact sheet.

    A sequence of frames has one, with the frame's number left open.
    """
    names = []
    path = Path(output) / FRAME_NAME if output.endswith("/") else Path(output)
    count = values.get("num_videos", 1)
    if isinstance(count, int) and 1 <= count <= _VIDEOS_MAX:
        names += [video.as_posix() for video in number_videos(path, count)]
    if (sheet := values.get("contact_sheet")) is not None:
        names.append(check_output_name(sheet, "contact_sheet"))
    return tuple(name for name in names if name != output)
