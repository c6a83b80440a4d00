"""Opening image files that somebody gave: only formats that are named, and nothing unpacked yet."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from PIL import Image, ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is read, whatever the file's name. For others Pillow may start programs: for EPS it is Ghostscript."""


def open_image_file(file: Path | IO[bytes], formats: Sequence[str] = FORMATS) -> ImageFile.ImageFile:
    """The image's header. Raises what Pillow raises, which is DecompressionBombError over 178,956,970 pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # from half of that; callers have their limits
        return Image.open(file, formats=list(formats))


def describe_format(path: Path) -> str:
    """What `open_image_file` could not identify, in words, by the first bytes alone."""
    Image.init()
    with path.open("rb") as file:
        start = file.read(16).ljust(16, b"\0")
    known = (name for name, (_, accept) in Image.OPEN.items() if accept is not None and accept(start) is True)
    found = next(known, None)
    if found is None:
        return "its format is not known"
    if found in FORMATS:
        return f"it begins as {found} and is damaged"
    return f"it is {found}, and only {', '.join(FORMATS)} are read"
