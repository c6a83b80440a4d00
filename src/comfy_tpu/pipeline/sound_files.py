"""The sound of a video file, for a video that is made of it."""

from __future__ import annotations

from pathlib import Path

import av
import av.error
import numpy as np
import torch

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.video_files import DEMUXERS, is_image_file


def read_sound(path: Path, field: str) -> Waveform | None:
    """The first sound of a file, one or two channels as they are, more mixed to two; None where it has none.

    It is in memory as a whole: 23 MB a minute of two channels.
    """
    if not path.is_file() or is_image_file(path):
        return None
    try:
        # A file object and a list of containers, as of videos: no playlist can name another file or address.
        options = {"format_whitelist": DEMUXERS}
        with path.open("rb") as file, av.open(file, "r", options=options) as container:
            if not container.streams.audio:
                return None
            stream = container.streams.audio[0]
            layout = "mono" if stream.channels == 1 else "stereo"
            resampler = av.AudioResampler(format="fltp", layout=layout, rate=stream.rate)
            parts = [
                part.to_ndarray()
                for frame in [*container.decode(stream), None]  # None: what the resampler still holds
                for part in resampler.resample(frame)
            ]
            rate = int(stream.rate)
    except (av.error.FFmpegError, ArithmeticError, AttributeError, OSError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"{field}={path} has a sound that cannot be read ({error}); give the video without it", field=field
        ) from error
    if not parts:
        return None
    samples = torch.from_numpy(np.concatenate(parts, axis=1)).float().clamp(-1, 1)
    return Waveform(samples[None], rate)
