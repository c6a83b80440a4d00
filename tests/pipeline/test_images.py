"""Images as people have them: every mode is read as what it shows, or refused in one sentence."""

import contextlib
import os
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from PIL.GifImagePlugin import GifImageFile
from PIL.PngImagePlugin import PngImageFile, PngInfo

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.images import read_image

GRADIENT = np.linspace(0, 255, 12 * 8).reshape(8, 12).astype(np.uint8)


def shown(image: Image.Image, path: Path, **options: Any) -> np.ndarray:
    image.save(path, **options)
    read = read_image(path)
    assert read.mode == "RGB"
    return np.asarray(read).astype(int)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P"])
def test_modes(mode: str, tmp_path: Path) -> None:
    gray = Image.fromarray(GRADIENT).convert(mode)
    assert np.abs(shown(gray, tmp_path / "a.png")[..., 1] - GRADIENT).max() <= 1


def test_16_bits_are_not_cut_off(tmp_path: Path) -> None:
    deep = Image.fromarray(GRADIENT.astype(np.uint16) * 257)
    assert np.array_equal(shown(deep, tmp_path / "a.png")[..., 0], GRADIENT)


def test_a_palette_with_transparency(tmp_path: Path) -> None:
    palette = Image.fromarray(GRADIENT).convert("P")
    assert np.array_equal(shown(palette, tmp_path / "a.png", transparency=3)[..., 0], GRADIENT)


def test_ink(tmp_path: Path) -> None:
    ink = Image.fromarray(np.stack((GRADIENT,) * 3, axis=-1)).convert("CMYK")
    assert np.abs(shown(ink, tmp_path / "a.jpg", quality=100)[..., 0] - GRADIENT).max() <= 4


def test_the_first_image_of_an_animation(tmp_path: Path) -> None:
    first, second = Image.fromarray(GRADIENT), Image.fromarray(255 - GRADIENT)
    assert np.array_equal(shown(first, tmp_path / "a.gif", save_all=True, append_images=[second])[..., 0], GRADIENT)


def test_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert shown(Image.fromarray(GRADIENT), tmp_path / "a.png", exif=exif).shape == (12, 8, 3)


@pytest.mark.parametrize("size", [(1, 1), (5000, 3)])
def test_any_size(size: tuple[int, int], tmp_path: Path) -> None:
    assert shown(Image.new("RGB", size, "red"), tmp_path / "a.png").shape == (size[1], size[0], 3)


def _with_large_text() -> bytes:
    """A PNG with more text in it than PIL unpacks."""
    notes = PngInfo()
    notes.add_text("workflow", " " * 2**21, zip=True)
    written = BytesIO()
    Image.fromarray(GRADIENT).save(written, format="PNG", pnginfo=notes)
    return written.getvalue()


def test_frames_after_the_first_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = Image.fromarray(255 - GRADIENT)
    Image.fromarray(GRADIENT).save(tmp_path / "a.gif", save_all=True, append_images=[second], duration=20)
    content = (tmp_path / "a.gif").read_bytes()
    again = content.index(b"!\xf9", content.index(b"!\xf9") + 1)  # the control block before each frame
    (tmp_path / "a.gif").write_bytes(content[:-1] + content[again:-1] * 100_000 + b";")
    sought = []
    seek = GifImageFile._seek
    monkeypatch.setattr(GifImageFile, "_seek", lambda *given, **more: (sought.append(given[1]), seek(*given, **more)))
    assert np.array_equal(np.asarray(read_image(tmp_path / "a.gif"))[..., 0], GRADIENT)
    assert set(sought) == {0}
    with Image.open(tmp_path / "a.gif") as image:
        image.seek(100)  # there are that many
    assert max(sought) == 100


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("read", [read_image, media.find_metadata], ids=["image", "earlier output"])
def test_no_program_is_started_for_an_image(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow hands PostScript to Ghostscript, whatever the file's name."""
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it is looked for once
    (tmp_path / "a.png").write_bytes(EPS)
    with contextlib.suppress(InvalidValueError):
        read(tmp_path / "a.png")
    assert not (tmp_path / "started").exists()
    with Image.open(tmp_path / "a.png") as image, contextlib.suppress(OSError):
        image.load()
    assert (tmp_path / "started").exists()  # so it would have been


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for content, found in (
        (EPS, "it is EPS, and only PNG, JPEG, WEBP, GIF, BMP, TIFF are read"),
        (b"P6 4 4 255\n" + bytes(48), "it is PPM, and only PNG, JPEG, WEBP, GIF, BMP, TIFF are read"),
        (b"GIF89a", "it begins as GIF and is damaged"),
        (b"", "its format is not known"),
        (b"no image at all", "its format is not known"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidValueError) as raised:
            read_image(path)
        assert str(raised.value) == f"image={path} cannot be read as an image ({found}); give a PNG or JPEG"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_are_read_whatever_the_name(kind: str, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png", format=kind)
    assert np.abs(np.asarray(read_image(tmp_path / "a.png")).astype(int) - (255, 0, 0)).max() <= 4


def declared_png(width: int, height: int) -> bytes:
    """The header of an image whose pixels do not follow."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ((12000, 12000), r"a.png is 12000×12000, more than 89478485 pixels; make it smaller"),
        ((16000, 16000), r"a.png has more than 89478485 pixels \(.*256000000.*\); make it smaller"),
    ],
)
def test_too_many_pixels_are_refused_before_they_are_unpacked(
    size: tuple[int, int], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PngImageFile, "load", lambda self: pytest.fail("it is unpacked"))
    (tmp_path / "a.png").write_bytes(declared_png(*size))
    with pytest.raises(InvalidValueError, match=text):
        read_image(tmp_path / "a.png")
    assert media.find_metadata(tmp_path / "a.png") == {}


def test_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(GRADIENT).resize((200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InvalidValueError, match=r"cannot be read as an image \(.*\); give a PNG or JPEG"):
        read_image(path)
    path.write_bytes(b"")
    with pytest.raises(InvalidValueError, match="cannot be read as an image"):
        read_image(path)
    for damaged in (b"P6 3x 2 255\n", _with_large_text()):  # PIL says ValueError
        path.write_bytes(damaged)
        with pytest.raises(InvalidValueError, match=r"cannot be read as an image \(.*\); give a PNG or JPEG"):
            read_image(path)
    Image.new("L", (16385, 1)).save(path)
    with pytest.raises(InvalidValueError, match="is 16385×1, more than 16384 on a side; make it smaller"):
        read_image(path)
    Image.fromarray(GRADIENT.astype(np.float32) / 255).save(tmp_path / "a.tiff")
    with pytest.raises(InvalidValueError, match="has floating-point pixels; save it as a PNG or JPEG"):
        read_image(tmp_path / "a.tiff")
