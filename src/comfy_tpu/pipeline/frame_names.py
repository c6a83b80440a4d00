"""Names of the frames of a PNG sequence: frames/f-%04d.png stands for frames/f-0000.png and so on."""

from __future__ import annotations

import re
from pathlib import Path

NUMBER = re.compile(r"%0?(?P<digits>\d*)d")
"""Where a frame's number goes in a name. Any other % is just a character."""


def is_sequence(path: Path) -> bool:
    return path.suffix == ".png" and NUMBER.search(path.name) is not None


def number_in(name: str, number: int) -> str:
    return NUMBER.sub(lambda match: f"{number:0{int(match['digits'] or 1)}d}", name)


def numbered(name: str) -> re.Pattern[str]:
    """Matches the names that `number_in` gives."""
    match = NUMBER.search(name)
    assert match is not None
    digits = rf"\d{{{int(match['digits'] or 1)},}}"
    return re.compile(re.escape(name[: match.start()]) + digits + re.escape(name[match.end() :]))
