"""Opens untrusted image files: only the listed formats, and without decoding pixels."""

from __future__ import annotations

import contextlib
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from PIL import Image, ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that are read, whatever the file's name. For others Pillow may start programs: Ghostscript for EPS."""


IMAGE_ERRORS = (
    *(OSError, EOFError, SyntaxError, NotImplementedError, Image.DecompressionBombError, struct.error, zlib.error),
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
)
"""What Pillow's readers raise of a damaged file: their own errors, and what Python says of a header's numbers."""


def open_image_file(file: Path | IO[bytes], formats: Sequence[str] = FORMATS) -> ImageFile.ImageFile:
    """Opens an image without decoding it. Raises Pillow's errors: DecompressionBombError over 178,956,970 pixels."""
    with quiet_images():
        return Image.open(file, formats=list(formats))


@contextlib.contextmanager
def quiet_images() -> Iterator[None]:
    """Without Pillow's warnings: of bombs, for which callers have limits, and of tags in a damaged file, whose image is
    read or refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
        yield


def describe_format(path: Path) -> str:
    """Describes a file that `open_image_file` could not identify, by its first bytes."""
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
