"""Templates of the files that `port new` writes: templates/*.txt, with `$name` where a fact goes."""

from __future__ import annotations

import string
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "templates"


def render(template: str, /, **values: object) -> str:
    """The text of a template with every `$name` replaced. Raises KeyError for a name without a value."""
    text = (_DIRECTORY / f"{template}.txt").read_text(encoding="utf-8")
    return string.Template(text).substitute(values)
