"""Context windows: which frames of a long video a model looks at together, and how their results are blended. With
tiles, which part of the frames.

Positions are latent frames. The index lists and weights are those of ComfyUI's context windows (`standard_static`,
`standard_uniform` and `looped_uniform` with a closed loop), compared in tests/families/test_context.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, get_args

from comfy_tpu.config import CONTEXT_WHOLE, ContextSchedule, ContextWeights, GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.tiles import Tiles, find_tiles, tile_settings

_COUNTS = (1, 2, 4, 8)
"""Up to two branches of eight windows: more rows than a slice of TPUs that a model is not split over has chips."""

Window = tuple[int, ...]
"""The latent frames of a window, in its order."""

Method = Literal["none", "static", "uniform", "looped", "continue"]
"""`Context` without auto."""


@dataclasses.dataclass(frozen=True)
class ContextWindows:
    """The windows of one video, in latent frames."""

    schedule: ContextSchedule
    frames: int
    """Of the whole video."""
    length: int
    overlap: int
    stride: int = 1
    weights: ContextWeights = "pyramid"
    tiles: Tiles | None = None
    """The parts of each frame that a window has; None: all of it."""

    @property
    def is_long(self) -> bool:
        """Whether a window has a part of the frames."""
        return self.frames > self.length

    def count(self) -> int:
        """The windows of the first step, by their tiles."""
        return len(self.at(0)) * (1 if self.tiles is None else len(self.tiles))

    def at(self, step: int) -> list[Window]:
        """The windows of a step, by its number from 0. Every frame is in one at least."""
        return list(_windows(self, 0 if self.schedule == "static" else step))

    def keyframes(self) -> Window:
        """One window from the first frame to the last, at distances that differ by one at most."""
        return tuple(round(place * (self.frames - 1) / (self.length - 1)) for place in range(self.length))

    def shares(self, windows: Sequence[Window]) -> list[tuple[float, ...]]:
        """The weight of each frame of each window; those of a frame of the video add up to 1."""
        weights = [window_weights(self, window) for window in windows]
        totals = [0.0] * self.frames
        for window, own in zip(windows, weights, strict=True):
            for frame, weight in zip(window, own, strict=True):
                totals[frame] += weight
        return [
            tuple(weight / totals[frame] for frame, weight in zip(window, own, strict=True))
            for window, own in zip(windows, weights, strict=True)
        ]


def choose_method(card: ModelCard, settings: GenerationSettings, *, begins_with_image: bool) -> Method:
    """How the video of these settings is made. A video that is no longer than a window is made whole. A model
    that makes all videos segment by segment continues even then, and "none" is one segment."""
    chosen, own = settings.context, settings.context_frames
    if card.makes_segments:
        return "none" if chosen == "none" else "continue"
    # A window of a video with sound would need the sound of its seconds: check_context refuses what is chosen.
    if chosen == "none" or card.makes_images or card.sound is not None or not 0 < own < settings.num_frames:
        return "none"
    if chosen == "auto":
        if settings.num_frames <= CONTEXT_WHOLE * own:
            return "none"
        return "continue" if begins_with_image and _can_continue(card) else "static"
    methods: dict[str, Method] = {name: name for name in get_args(Method)}
    return methods[chosen]


def settle_context(card: ModelCard, settings: GenerationSettings, images: Collection[Any]) -> GenerationSettings:
    """The settings of a video from these images, for stages that are not given the images: auto becomes continue."""
    method = choose_method(card, settings, begins_with_image=begins_with_image(card, images))
    return dataclasses.replace(settings, context=method) if method == "continue" else settings


def _can_continue(card: ModelCard) -> bool:
    """Whether the model begins with a first frame alone."""
    image = card.image
    return image is not None and image.role == "first_frame" and image.last_image != "required"


def begins_with_image(card: ModelCard, images: Collection[Any]) -> bool:
    """Whether the given images, or their embeddings, are the video's first frame."""
    return bool(images) and card.image is not None and card.image.role == "first_frame"


def needs_first_frame(card: ModelCard) -> bool:
    """Whether all videos of a model begin with an image: `begins_with_image` where only the model is known."""
    return card.image is not None and card.image.role == "first_frame" and card.image.required


def find_windows(card: ModelCard, settings: GenerationSettings, method: Method) -> ContextWindows | None:
    """The windows of a video; None where it is made whole, or in segments."""
    tiles, frames = find_tiles(card, settings), card.latent_frames(settings)
    if method == "none" and tiles is not None:
        return ContextWindows("static", frames, length=frames, overlap=0, tiles=tiles)
    if method not in get_args(ContextSchedule):
        return None
    schedules: dict[str, ContextSchedule] = {name: name for name in get_args(ContextSchedule)}
    weights: dict[str, ContextWeights] = {name: name for name in get_args(ContextWeights)}
    return ContextWindows(
        schedule=schedules[method],
        frames=frames,
        length=card.latent_frames(window_settings(settings)),
        overlap=overlap_latents(settings, card.temporal_scale),
        stride=settings.context_stride,
        weights=weights[settings.context_weights],
        tiles=tiles,
    )


def window_settings(settings: GenerationSettings) -> GenerationSettings:
    """The settings of one window, or of one segment, as a video of its own."""
    return without_windows(dataclasses.replace(settings, num_frames=settings.context_frames))


def without_windows(settings: GenerationSettings) -> GenerationSettings:
    """The settings of the same video made whole, without tiles either and what is refused then."""
    return dataclasses.replace(
        settings, context="none", context_stride=1, context_noise="random", context_keyframes=0.0, tile=""
    )


def seen_settings(card: ModelCard, settings: GenerationSettings) -> GenerationSettings:
    """The settings of what the transformer looks at, as a video of its own: a window, a tile of one, a segment."""
    method = choose_method(card, settings, begins_with_image=needs_first_frame(card))
    seen = tile_settings(settings)
    return seen if method == "none" else window_settings(seen)


def call_settings(card: ModelCard, settings: GenerationSettings, windows: int) -> GenerationSettings:
    """The settings of one call of the transformer: each of these windows is a video of its own."""
    return dataclasses.replace(seen_settings(card, settings), num_videos=settings.num_videos * windows)


def window_counts(card: ModelCard, settings: GenerationSettings) -> tuple[int, ...]:
    """The numbers of windows in a call between which a layout may be chosen; 1 for a video without windows."""
    method = choose_method(card, settings, begins_with_image=needs_first_frame(card))
    context = find_windows(card, settings, method)
    return (1,) if context is None else tuple(count for count in _COUNTS if count <= context.count())


def overlap_latents(settings: GenerationSettings, temporal_scale: int) -> int:
    """The latent frames that hold the overlap, or all but one of a window."""
    return min(-(-settings.context_overlap // temporal_scale), (settings.context_frames - 1) // temporal_scale)


def _windows(context: ContextWindows, step: int) -> Sequence[Window]:
    if context.frames <= context.length:
        return (tuple(range(context.frames)),)
    return _MAKERS[context.schedule](context, step)


def _static_windows(context: ContextWindows, step: int) -> Sequence[Window]:
    """Windows at equal distances; the last one ends with the video, and overlaps more."""
    last = context.frames - context.length
    starts = [*range(0, last, context.length - context.overlap), last]
    return tuple(_span(start, context.length) for start in starts)


@functools.lru_cache(maxsize=256)
def _uniform_windows(context: ContextWindows, step: int) -> Sequence[Window]:
    """Windows that begin elsewhere at each step. One that would go on at the beginning of the video is moved to its
    end; of equal ones the first is kept."""
    narrow = (context.frames - 1) // (context.length - 1) if context.length > 1 else 1
    # Without windows that are wider than the video: for those, ComfyUI names frames beyond its end.
    stride = min(context.stride, narrow.bit_length())
    context = dataclasses.replace(context, stride=stride)
    found = list(_circular_windows(context, step, context.frames - context.overlap))
    number = 0
    while number < len(found):
        window = found[number]
        wrap = next((place for place, frame in enumerate(window) if place and frame < window[place - 1]), None)
        if wrap is not None:
            # The frame behind the end must stay in the next window, which may be the first.
            first = window[wrap]
            distance = context.frames - 1 - (window[-1] - window[0]) % context.frames
            found[number] = tuple((frame - window[0]) % context.frames + distance for frame in window)
            if first not in found[(number + 1) % len(found)]:
                found.insert(number + 1, _span(first, context.length))
        number += 1
    return _cover(context, list(dict.fromkeys(found)))


@functools.lru_cache(maxsize=256)
def _looped_windows(context: ContextWindows, step: int) -> Sequence[Window]:
    return _cover(context, list(_circular_windows(context, step, context.frames)))


def _circular_windows(context: ContextWindows, step: int, reach: int) -> Iterator[Window]:
    """Windows on the circle of the video's frames, first of neighbouring frames, then of every second, and so on.
    `reach`: the frames, from the first window's beginning, in which windows begin."""
    shift = _ordered_halving(step)
    begin = round(context.frames * shift)
    most = min(context.stride, math.ceil(math.log2(context.frames / context.length)) + 1)
    for distance in (2**power for power in range(most)):
        first = begin + int(shift * distance)
        for start in range(first, begin + reach, context.length * distance - context.overlap):
            window = tuple((start + place * distance) % context.frames for place in range(context.length))
            if len(set(window)) == context.length:  # wider than the video, it may have a frame twice
                yield window


def _cover(context: ContextWindows, windows: list[Window]) -> Sequence[Window]:
    """The windows, and one more for each run of frames that none of them has."""
    seen = {frame for window in windows for frame in window}
    for frame in range(context.frames):
        if frame not in seen:
            window = _span(min(frame, context.frames - context.length), context.length)
            windows.append(window)
            seen.update(window)
    return tuple(windows)


def _span(start: int, length: int) -> Window:
    return tuple(range(start, start + length))


def _ordered_halving(step: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, 5/8, …: the bits of the step behind the point, the lowest first."""
    value, weight = 0.0, 0.5
    while step:
        value += weight * (step & 1)
        step, weight = step >> 1, weight / 2
    return value


_LEAST = 1e-37
"""The least weight of a ramp; not 0, for frames that no other window has."""

_MAKERS: dict[str, Callable[[ContextWindows, int], Sequence[Window]]] = {
    "static": _static_windows,
    "uniform": _uniform_windows,
    "looped": _looped_windows,
}


def window_weights(context: ContextWindows, window: Window) -> tuple[float, ...]:
    """The weights of a window's frames, before those of all windows are made to add up to 1."""
    length = len(window)
    if context.weights == "pyramid":
        return tuple(float(min(place, length - 1 - place) + 1) for place in range(length))
    weights = [1.0] * length
    if context.weights == "overlap-linear" and context.overlap:
        count = context.overlap
        if min(window) > 0:
            weights[:count] = _ramp(_LEAST, 1.0, count)
        if max(window) < context.frames - 1:
            weights[-count:] = _ramp(1.0, _LEAST, count)
    return tuple(weights)


def _ramp(first: float, last: float, count: int) -> list[float]:
    """`count` weights at equal distances; one is the first."""
    parts = [place / max(count - 1, 1) for place in range(count)]
    return [first * (1 - part) + last * part for part in parts]
