"""Limits on the shapes that clients order: the first job of each compiles its programs, for a minute or longer."""

from __future__ import annotations

import collections
import math
import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.families.settings import make_settings
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.serving.served_model import ServedModel

Sizes = tuple[tuple[int, int], ...]
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_HOUR = 3600.0
_SHAPES_MAX = 10_000
"""Shapes that are remembered: clients choose them, and any number of them."""


class NewShapesError(ComfyTpuError):
    """A client ordered as many new shapes as it may in an hour."""

    def __init__(self, message: str, retry_seconds: int) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


def parse_sizes(text: str) -> Sizes:
    """ "832x480,1280x720" as widths and heights."""
    found = [(each.strip(), _SIZE.fullmatch(each.strip())) for each in text.split(",")]
    for each, match in found:
        if match is None:
            raise InvalidValueError(f"sizes: {each[:40]!r} is not WIDTHxHEIGHT; write 832x480,1280x720", field="sizes")
    return tuple(dict.fromkeys((int(match[1]), int(match[2])) for _, match in found if match))


def check_models(sizes: Sizes, models: Mapping[str, ServedModel]) -> None:
    """Raises InvalidValueError for a size that no model takes, and for a model that takes none of the sizes."""
    taken = {name: taken_sizes(model, sizes) for name, model in models.items()}
    for size in sizes:
        if not any(size in each for each in taken.values()):
            raise InvalidValueError(f"sizes: {describe((size,))} suits none of the models; leave it out", field="sizes")
    for name, own in taken.items():
        if sizes and not own:
            raise InvalidValueError(f"sizes: model {name} takes none of {describe(sizes)}; add one", field="sizes")


def taken_sizes(model: ServedModel, sizes: Sizes) -> Sizes:
    """Those of the sizes that a model takes, its own first."""
    own = (model.defaults.width, model.defaults.height)
    return tuple(sorted((size for size in sizes if _takes(model, size)), key=own.__ne__))


def own_size(model: ServedModel, sizes: Sizes) -> dict[str, int]:
    """What a request has that names no size: the model's own, or the first that is taken; nothing where all are."""
    return next(({"width": width, "height": height} for width, height in taken_sizes(model, sizes)), {})


def _takes(model: ServedModel, size: tuple[int, int]) -> bool:
    try:
        make_settings(model.defaults, {"width": size[0], "height": size[1]}, model.card.limits)
    except InvalidValueError:
        return False
    return True


def check_sizes(sizes: Sizes, passes: Sequence[GenerationSettings]) -> None:
    """Raises InvalidValueError for a size that the server does not take. No sizes: it takes any."""
    for settings in passes:
        size = (settings.width, settings.height)
        if sizes and size not in sizes:
            raise InvalidValueError(
                f"size={describe((size,))} is not taken here; choose from {describe(sizes)}", field="size"
            )


def describe(sizes: Sizes) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sizes)


def shape_of(model: str, settings: GenerationSettings) -> tuple[Hashable, ...]:
    """Equal for settings that run the same programs."""
    size = (settings.width, settings.height, settings.num_frames, settings.num_videos)
    # Models compute one branch up to 0 or up to 1: three kinds of scales, whatever their number.
    branches = max(0, min(2, math.ceil(settings.guidance_scale)))
    context = (settings.context, settings.context_frames, settings.context_overlap, settings.context_stride)
    return (model, *size, branches, settings.max_sequence_length, context, settings.tile, settings.tile_overlap)


def media_shape(model: ServedModel, given: GivenMedia) -> tuple[Hashable, ...]:
    """Equal for media that run the same programs: images without a size of their own are resized to the result."""
    encoding = None if model.files is None else model.files.family.media
    if encoding is None or encoding.fit_reference is None:
        return len(given.images), len(given.references), *sorted(given.videos)
    return tuple(encoding.fit_reference(image).size for image in (*given.images, *given.references))


class NewShapes:
    """Counts the shapes that nobody ordered before, for each client in the last hour. May be used from any thread."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._known: dict[Hashable, None] = {}
        self._ordered: dict[str, collections.deque[float]] = {}
        """By client, when it ordered each."""
        self._lock = threading.Lock()

    def know(self, shapes: Sequence[Hashable]) -> None:
        """Shapes that are new for nobody."""
        with self._lock:
            self._known |= dict.fromkeys(shapes)

    def add(self, client: str, shapes: Sequence[Hashable]) -> None:
        """Raises NewShapesError for a client whose hour has no room for those of the shapes that are new."""
        with self._lock:
            new, now = set(shapes) - self._known.keys(), self._clock()
            times = self._ordered.setdefault(client, collections.deque())
            while times and now - times[0] >= _HOUR:
                times.popleft()
            if new and len(times) + len(new) > self._most:
                wait = math.ceil(times[0] + _HOUR - now) if times else int(_HOUR)
                raise NewShapesError(
                    f"this client ordered {len(times)} new shapes in the last hour, and {self._most} are the most: "
                    "each size, number of frames or of videos is compiled at its first order; choose one that was "
                    "ordered before, or wait",
                    wait,
                )
            times.extend([now] * len(new))
            self._known |= dict.fromkeys(new)
            for old in list(self._known)[:-_SHAPES_MAX]:
                del self._known[old]
