"""--preview: an image of what a run is making, written anew after each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.parallel.hosts import is_first_host
from comfy_tpu.pipeline import atomic
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".gif": "GIF", ".webp": "WEBP"}
_ANIMATED = ("GIF", "WEBP")
_SIDE_MIN = 256
"""Pixels: colours are one for each latent, 104 × 60 of them at 480p."""


def check_preview(path: Path | None) -> None:
    """Raises InvalidValueError for a name that cannot be written, before the model is opened."""
    if path is None or not is_first_host():
        return
    if path.suffix.lower() not in _FORMATS:
        raise InvalidValueError(f"preview={path} is no image; give it a name in {', '.join(_FORMATS)}", field="preview")
    atomic.check_place(path, field="preview")


class PreviewFile:
    """A progress callback that writes previews of the first video."""

    def __init__(self, path: Path, pipeline: VideoPipeline) -> None:
        if pipeline.previews is None:
            raise InvalidValueError(
                f"preview needs a tiny decoder, because {pipeline.model_name} has no preview.json; give one with "
                "--tiny-vae",
                field="preview",
            )
        self._path, self._previews = path, pipeline.previews
        self._format = _FORMATS[path.suffix.lower()]
        self._temporal_scale = pipeline.family.card.temporal_scale
        self.fps = pipeline.defaults.fps
        """Those of the video. A run sets its own: a model is opened before its settings are known."""

    def __call__(self, progress: Progress) -> None:
        if progress.preview is None or not is_first_host():
            return
        latents = progress.preview()
        count = latents.shape[2]
        shown = range(count) if self._format in _ANIMATED else range(count // 2, count // 2 + 1)
        images = [_enlarge(image) for image in self._previews.render(latents, shown)]
        if images:
            self._write(images)

    def _write(self, images: Sequence[Image.Image]) -> None:
        milliseconds = 1000 * self._temporal_scale / self.fps  # between two latents
        animation = {"save_all": True, "append_images": images[1:], "duration": milliseconds, "loop": 0}
        options = animation if len(images) > 1 else {}
        with atomic.replacing(self._path) as partial, atomic.write_errors(self._path):
            images[0].save(partial, self._format, **options)


def _enlarge(image: Image.Image) -> Image.Image:
    factor = -(-_SIDE_MIN // max(image.size))
    return (
        image if factor == 1 else image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    )
