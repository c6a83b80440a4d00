"""The sound of a video file, for a video that is made of it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
import numpy.typing as npt
import torch

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.video_files import DEMUXERS, is_image_file

_SAMPLES_MAX = 2**29
"""Of all channels: 2 GiB, or 93 minutes of two channels at 48 kHz."""
_GAP_MIN = 0.015
"""Seconds. A missing packet of Opus is 20 ms and one of AAC 21 ms at 48 kHz; Matroska rounds times to 1 ms."""


def read_sound(path: Path, field: str, *, begin: float = 0.0, seconds: float = math.inf) -> Waveform | None:
    """The first sound of a file, one or two channels as they are, more mixed to two; None where it has none.

    `begin`: the time by the file's clock that becomes the beginning, that of the first picture; `seconds`: how long
    the pictures are shown. Silence is where the file has no sound between. It is in memory as a whole, 23 MB a minute
    of two channels: a longer one than 2 GiB is refused.
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
            rate, channels = int(stream.rate), 1 if layout == "mono" else 2
            track = _Track(channels, rate, begin, seconds)
            for frame in itertools.chain(container.decode(stream), [None]):  # None: what the resampler still holds
                time = _frame_time(frame)
                for part in resampler.resample(frame):
                    track.add(part.to_ndarray(), time)
                    time = None  # the others follow
                if track.is_full:
                    break
    except _TooLongError:
        minutes = _SAMPLES_MAX / (60 * rate * channels)
        raise InvalidValueError(
            f"{field}={path} has a sound of more than {minutes:,.0f} minutes, more than fits into memory; cut a piece "
            "out of it",
            field=field,
        ) from None
    except (av.error.FFmpegError, ArithmeticError, AttributeError, OSError, TypeError, ValueError) as error:
        raise InvalidValueError(
            f"{field}={path} has a sound that cannot be read ({error}); give the video without it", field=field
        ) from error
    if not track.parts:
        return None
    samples = torch.from_numpy(np.concatenate(track.parts, axis=1)).float().clamp(-1, 1)
    return Waveform(samples[None], rate)


def _frame_time(frame: Any) -> float | None:
    """When a frame of sound begins by the file's clock, in seconds; None where the file does not say."""
    if frame is None or frame.pts is None or frame.time_base is None:
        return None
    return float(frame.pts * frame.time_base)


class _Track:
    """Samples at their times: silence where there are none, and none from before the beginning or after the end.

    Samples whose time has passed follow those before them: a time that goes back is mostly rounded, or wrong.
    """

    def __init__(self, channels: int, rate: int, begin: float, seconds: float) -> None:
        self.parts: list[npt.NDArray[Any]] = []
        """float32 [channels, samples] each."""
        self._channels, self._rate, self._begin = channels, rate, begin
        self._limit = seconds * rate
        self._count = 0
        """The samples of all parts."""
        self._next: int | None = None
        """The place of the sample after the last one, below 0 before the beginning; None before the first."""

    @property
    def is_full(self) -> bool:
        return self._next is not None and self._next >= self._limit

    def add(self, samples: npt.NDArray[Any], time: float | None) -> None:
        """`samples`: [channels, samples]; `time`: when they begin by the file's clock; None: after the last ones."""
        place = self._find_place(time)
        self._next = place + samples.shape[1]
        place, samples = max(0, place), samples[:, max(0, -place) :]
        samples = samples[:, : max(0, math.ceil(min(samples.shape[1], self._limit - place)))]
        if not samples.size:
            return
        if (place + samples.shape[1]) * self._channels > _SAMPLES_MAX:
            raise _TooLongError  # before the silence is allocated: a damaged time may say years
        if place > self._count:
            self.parts.append(np.zeros((self._channels, place - self._count), np.float32))
        self.parts.append(samples)
        self._count = place + samples.shape[1]

    def _find_place(self, time: float | None) -> int:
        if time is None:
            return self._next or 0
        place = round((time - self._begin) * self._rate)
        if self._next is not None and place < self._next + _GAP_MIN * self._rate:
            return self._next
        return place


class _TooLongError(Exception):
    """More samples than are read."""
