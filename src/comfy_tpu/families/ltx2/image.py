"""The first frame of an LTX-2 video: an image as it would be in a compressed video, which the model was trained on."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError

_COMPRESSION = {"crf": "33", "preset": "veryfast"}
"""Of H.264."""


def fit_frame(image: Image.Image, settings: GenerationSettings) -> Image.Image:
    """An RGB image, compressed in its own size and stretched to the frame."""
    # Once decoded, the same image is compressed to the same bytes: one thread, one frame.
    return _compress(image).resize((settings.width, settings.height), resample=Image.Resampling.BILINEAR)


def _compress(image: Image.Image) -> Image.Image:
    import av

    width, height = (side // 2 * 2 for side in image.size)  # 4:2:0 has one colour sample for 2 × 2 pixels
    if not width or not height:
        raise InvalidValueError(
            f"image is {image.width}×{image.height}, expected two pixels on a side at least; give a larger one",
            field="image",
        )
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1, options=_COMPRESSION)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        pixels = np.array(image.crop((0, 0, width, height)))
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")))
        container.mux(stream.encode(None))
    file.seek(0)
    with av.open(file, "r") as compressed:
        return Image.fromarray(next(compressed.decode(video=0)).to_ndarray(format="rgb24"))
