"""The ways in which a Wan VAE can decode a video, and the choices of a run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.wan.card import WAN21

_SIDE = WAN21.limits.size_multiple


@dataclasses.dataclass(frozen=True)
class VideoSize:
    width: int
    height: int
    frames: int

    @classmethod
    def parse(cls, text: str) -> VideoSize:
        """From "832x480x81"."""
        width, height, frames = map(int, re.fullmatch(r"(\d+)x(\d+)x(\d+)", text).groups())  # type: ignore[union-attr]
        return cls(width, height, frames)

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, height, width."""
        scale = WAN21.spatial_scale
        return (self.frames - 1) // WAN21.temporal_scale + 1, self.height // scale, self.width // scale


VARIANTS: Mapping[str, str] = {
    "torchax-unrolled": "torchax unrolled",
    "torchax-scanned": "torchax scanned",
    "torchax-frames": "torchax frame by frame",
    "nnx-unrolled": "NNX unrolled",
    "nnx-scanned": "NNX scanned",
    "nnx-frames": "NNX frame by frame",
    "eager": "diffusers eager",
    "compile": "diffusers + torch.compile",
}
"""unrolled: one program that has every frame written out; scanned: one with a loop over the frames; frame by frame: a
program for one, called in a loop of Python."""
UNLESS_ASKED_FOR = ("compile",)
"""Left out on a CPU, where it compiles longer than everything else."""

INPUTS, START, TURNS = "vae inputs", "vae start", "vae in turns"
"""Parts of a run: the inputs of all variants; a variant in a process of its own; all of them in turn in one."""

CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {"full": {}, "narrow": {"base_dim": 16}}
"""Wan 2.1's VAE as published; and the same layers with a sixth of its channels."""
_SIZES = {"full": VideoSize(832, 480, 81), "narrow": VideoSize(64, 48, 81)}


@dataclasses.dataclass(frozen=True)
class VaeChoices:
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    repeats: int = 5
    variants: tuple[str, ...] = ()
    full_size: bool = False

    def __post_init__(self) -> None:
        for name, step, rest in (
            ("frames", WAN21.temporal_scale, 1),
            ("height", _SIDE, 0),
            ("width", _SIDE, 0),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1 or value % step != rest):
                form = f"{step}n+{rest}" if rest else f"a multiple of {step}"
                raise InvalidValueError(
                    f"{name}={value} is not {form}; try {getattr(_SIZES['narrow'], name)}", field=name
                )
        if not isinstance(self.repeats, int) or self.repeats < 1:
            raise InvalidValueError(
                f"repeats={self.repeats!r} is not allowed; give a whole number from 1", field="repeats"
            )

    @property
    def model(self) -> str:
        return "full" if self.full_size else "narrow"

    @property
    def size(self) -> VideoSize:
        given = {name: getattr(self, name) for name in ("width", "height", "frames")}
        return dataclasses.replace(
            _SIZES[self.model], **{name: value for name, value in given.items() if value is not None}
        )

    @property
    def command(self) -> str:
        words = ["python -m benchmarks.vae"]
        words += [f"--{name} {getattr(self, name)}" for name in ("frames", "height", "width") if getattr(self, name)]
        words += [f"--dtype {self.dtype}"] if self.dtype != "auto" else []
        words += [f"--repeats {self.repeats}"] if self.repeats != VaeChoices.repeats else []
        words += [f"--variants {','.join(self.variants)}"] if self.variants else []
        words += ["--full-size"] if self.full_size else []
        return " ".join(words)
