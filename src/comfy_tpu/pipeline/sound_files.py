"""The sound of a video file, for a video that is made of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import av
import av.error
import numpy as np
import torch

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.video_files import DEMUXERS, is_image_file

_SAMPLES_MAX = 2**29
"""Of all channels: 2 GiB, or 93 minutes of two channels at 48 kHz."""


def read_sound(path: Path, field: str) -> Waveform | None:
    """The first sound of a file, one or two channels as they are, more mixed to two; None where it has none.

    It is in memory as a whole, 23 MB a minute of two channels: a longer one than 2 GiB is refused.
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
            rate, count = int(stream.rate), 0
            parts = []
            for frame in itertools.chain(container.decode(stream), [None]):  # None: what the resampler still holds
                made = [part.to_ndarray() for part in resampler.resample(frame)]
                parts += made
                count += sum(part.size for part in made)
                if count > _SAMPLES_MAX:
                    raise _TooLongError
    except _TooLongError:
        minutes = _SAMPLES_MAX / (60 * rate * len(parts[0]))
        raise InvalidValueError(
            f"{field}={path} has a sound of more than {minutes:,.0f} minutes, more than fits into memory; cut a piece "
            "out of it",
            field=field,
        ) from None
    except (av.error.FFmpegError, ArithmeticError, AttributeError, OSError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"{field}={path} has a sound that cannot be read ({error}); give the video without it", field=field
        ) from error
    if not parts:
        return None
    samples = torch.from_numpy(np.concatenate(parts, axis=1)).float().clamp(-1, 1)
    return Waveform(samples[None], rate)


class _TooLongError(Exception):
    """More samples than are read."""
