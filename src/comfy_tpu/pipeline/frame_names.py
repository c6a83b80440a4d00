"""Names of several videos, and of the frames of a PNG sequence: frames/f-%04d.png stands for frames/f-0000.png and so
on."""

from __future__ import annotations

import re
from pathlib import Path

NUMBER = re.compile(r"%0?(?P<digits>\d{0,3})d")
"""The place of a frame's number in a name, of up to 999 digits: no file has a longer name. Any other % is an ordinary
character."""


FRAME_NAME = "frame_%04d.png"
"""The frames of a sequence for which only a directory is given."""


def number_videos(path: Path, count: int) -> tuple[Path, ...]:
    """The path of each of `count` videos."""
    if count == 1:
        return (path,)
    if is_sequence(path):
        return tuple(path.parent / f"video-{index}" / path.name for index in range(count))
    return tuple(path.with_stem(f"{path.stem}-{index}") for index in range(count))


def is_sequence(path: Path) -> bool:
    return path.suffix == ".png" and NUMBER.search(path.name) is not None


def insert_number(name: str, number: int) -> str:
    return NUMBER.sub(lambda match: f"{number:0{int(match['digits'] or 1)}d}", name)


def frame_name_pattern(name: str) -> re.Pattern[str]:
    """A pattern for the names that `insert_number` returns."""
    match = NUMBER.search(name)
    assert match is not None
    digits = rf"\d{{{int(match['digits'] or 1)},}}"
    return re.compile(re.escape(name[: match.start()]) + digits + re.escape(name[match.end() :]))
