"""Uploaded reference images of any size make few shapes of a step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from comfy_tpu.families.flux2 import image as flux2
from comfy_tpu.families.qwen_image import image as qwen_image
from comfy_tpu.serving.given_files import fit_references
from comfy_tpu.serving.uploads import Upload


def fit_all(media: Any, sizes: list[tuple[int, int]], directory: Path) -> set[tuple[int, int]]:
    """The shapes that the model's own fitting makes of what the server keeps."""
    model: Any = SimpleNamespace(files=SimpleNamespace(family=SimpleNamespace(media=media)))
    shapes = set()
    for number, size in enumerate(sizes):
        path = directory / f"{number}"
        Image.new("RGB", size, "red").save(path, "PNG", compress_level=1)
        fit_references(model, [Upload("image", path, "")])
        with Image.open(path) as image:
            shapes.add(media.fit_reference(image).size)
    return shapes


@pytest.mark.parametrize("media", [flux2.REFERENCES, qwen_image.REFERENCES])
def test_uploads_of_any_size_have_few_shapes(media: Any, tmp_path: Path) -> None:
    sizes = [(1200 + 7 * number, 1100 + number % 3) for number in range(60)]
    assert len({media.fit_reference(Image.new("L", size)).size for size in sizes}) > 10
    assert len(fit_all(media, sizes, tmp_path)) <= 6


def test_small_and_fitting_images_stay_as_they_are(tmp_path: Path) -> None:
    for number, size in enumerate([(500, 300), (832, 1216)]):
        path = tmp_path / f"{number}"
        Image.new("RGB", size).save(path, "PNG")
        before = path.read_bytes()
        model: Any = SimpleNamespace(files=SimpleNamespace(family=SimpleNamespace(media=flux2.REFERENCES)))
        fit_references(model, [Upload("image", path, "")])
        assert path.read_bytes() == before
