"""More frames per second: frames between the frames of a video, made as the video comes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.single_file import open_single_file
from comfy_tpu.compiler.stored import open_store
from comfy_tpu.config import CacheConfig, Interpolation
from comfy_tpu.errors import CheckpointError, InvalidValueError, trace_errors
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.checks import check_finite
from comfy_tpu.pipeline.ifnet import IFNET, interpolate_frames, read_ifnet
from comfy_tpu.pipeline.model_files import digest_tensors

FACTOR_MAX = 8


def read_interpolation(factor: Any, model: str | Path | None) -> Interpolation | None:
    """The chosen interpolation; None: none is. Raises InvalidValueError where one of the two is missing or odd."""
    if factor is None:
        if model is not None:
            raise InvalidValueError(
                f"interpolation_model={model} is for more frames; give --interpolate too, such as 2",
                field="interpolation_model",
            )
        return None
    if not isinstance(factor, int) or isinstance(factor, bool) or not 2 <= factor <= FACTOR_MAX:
        raise InvalidValueError(
            f"interpolate={factor!r} is not a whole number from 2 to {FACTOR_MAX}; 2 doubles the frames per second",
            field="interpolate",
        )
    if model is None:
        raise InvalidValueError(
            "interpolation_model is missing: frames between frames are made by a network; give its file, such as "
            "rife_v4.26.safetensors",
            field="interpolation_model",
        )
    return Interpolation(factor, Path(model))


def check_interpolation(interpolation: Interpolation | None, *, makes_images: bool, fps: int, fps_max: int) -> None:
    """Raises InvalidValueError for an image, or a frame rate that nothing plays. Starts no devices."""
    if interpolation is None:
        return
    if makes_images:
        raise InvalidValueError(
            f"interpolate={interpolation.factor} is for videos, and the model makes images; leave it out",
            field="interpolate",
        )
    if interpolation.factor * fps > fps_max:
        raise InvalidValueError(
            f"interpolate={interpolation.factor} makes {interpolation.factor * fps} frames per second of {fps}, more "
            f"than {fps_max}; choose a smaller number, or a smaller fps",
            field="interpolate",
        )


class Interpolator:
    """Makes frames between those of videos, on one device, with the memory of one pair of frames."""

    def __init__(
        self, interpolation: Interpolation, platform: str = "auto", cache: CacheConfig = CacheConfig()
    ) -> None:
        """Reads the file's header; weights are loaded with the first frames."""
        path = interpolation.model
        try:
            self._source, config = read_ifnet(open_single_file(path))
        except CheckpointError as error:
            raise CheckpointError(f"interpolation_model={error}", field="interpolation_model") from error
        self.factor = interpolation.factor
        self._path = path
        placement = make_placement("single", platform=platform)
        # In float32 everywhere: the motion is counted in pixels, of which bfloat16 has 256 exactly.
        self._component = Component(IFNET, config, placement, dtype=torch.float32, cache=cache, store=open_store(cache))
        try:
            self._component.check(self._source)
        except CheckpointError as error:
            raise CheckpointError(f"interpolation_model={path}: {error}", field="interpolation_model") from error
        errors = functools.partial(trace_errors, IFNET.name, str(path))
        self._program = self._component.program(interpolate_frames, trace_errors=errors)

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        digest_tensors(self._path, digest)
        return f"{digest.hexdigest()[:16]} x{self.factor}"

    @functools.cached_property
    def _weights(self) -> Any:
        return self._component.load(self._source)

    def interpolate(self, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Frames [videos, t, height, width, 3] in 0..1 as they come -> the same with `factor` - 1 frames between each
        two; of n frames (n - 1) × factor + 1."""
        times = torch.arange(1, self.factor) / self.factor
        last: torch.Tensor | None = None
        for part in parts:
            made = []
            for frame in part.float().unbind(dim=1):
                if last is not None:
                    made.append(self._between(last, frame, times))
                made.append(frame[:, None])
                last = frame
            if made:
                yield torch.cat(made, dim=1)

    def _between(self, first: torch.Tensor, second: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        rows = [
            to_host(self._program(self._weights, first=one.contiguous(), second=other.contiguous(), times=times))
            for one, other in zip(first.split(1), second.split(1), strict=True)  # one program whatever their number
        ]
        frames = torch.cat(rows)
        check_finite("the interpolation", {"frames": frames}, "float32")
        return frames
