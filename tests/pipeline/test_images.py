"""Pictures as people have them: every mode is read as what it shows, or refused in one sentence."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from comfy_tpu.errors import InvalidValueError
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


def test_the_first_of_moving_pictures(tmp_path: Path) -> None:
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


def test_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(GRADIENT).resize((200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InvalidValueError, match=r"cannot be read as a picture \(.*\); give a PNG or JPEG"):
        read_image(path)
    path.write_bytes(b"")
    with pytest.raises(InvalidValueError, match="cannot be read as a picture"):
        read_image(path)
    for damaged in (b"P6 3x 2 255\n", _with_large_text()):  # PIL says ValueError
        path.write_bytes(damaged)
        with pytest.raises(InvalidValueError, match=r"cannot be read as a picture \(.*\); give a PNG or JPEG"):
            read_image(path)
    Image.new("L", (16385, 1)).save(path)
    with pytest.raises(InvalidValueError, match="is 16385×1, more than 16384 on a side; make it smaller"):
        read_image(path)
    Image.fromarray(GRADIENT.astype(np.float32) / 255).save(tmp_path / "a.tiff")
    with pytest.raises(InvalidValueError, match="has floating-point pixels; save it as a PNG or JPEG"):
        read_image(tmp_path / "a.tiff")
