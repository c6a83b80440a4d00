"""Arguments whose values decide what a program computes: they belong to the program, instead of being given to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch

from comfy_tpu.comfy.native import packed

_DENOISE_MASK = "denoise_mask"
_MODELS = frozenset({"LTXVModel", "LTXAVModel"})
"""Models that look where their mask is negative, for the tokens that they drop, and whether a frame's mask varies."""


@dataclasses.dataclass(frozen=True)
class WithConstants:
    """A function for a trace, with arguments that are known in it. Two are equal if they compute the same."""

    function: Callable[..., Any]
    key: Hashable
    constants: dict[str, Any] = dataclasses.field(compare=False)

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, module: torch.nn.Module, arguments: dict[str, Any], *others: Any) -> Any:
        return self.function(module, arguments | self.constants, *others)


def bind_constants(
    module: torch.nn.Module, function: Callable[..., Any], arguments: dict[str, Any]
) -> Callable[..., Any]:
    """The function with the constants among the arguments, which are removed from them; the function itself if none
    are."""
    if type(module).__name__ in packed.MODELS:
        return WithConstants(packed.with_traced_times(function), *packed.split_payload(arguments))
    if type(module).__name__ not in _MODELS or arguments.get(_DENOISE_MASK) is None:
        return function
    mask = _simplify_mask(arguments.pop(_DENOISE_MASK))
    return WithConstants(function, (tuple(mask.shape), mask.dtype, mask.numpy().tobytes()), {_DENOISE_MASK: mask})


def _simplify_mask(mask: torch.Tensor) -> torch.Tensor:
    """A mask with the same program: negative where this one is, and varying within the same frames."""
    mask = mask.float().cpu()
    simple = -(mask < 0).float()
    frames = mask[0, 0].flatten(1)
    simple[0, 0, :, 0, 0] += 0.5 * (frames.amin(1) != frames.amax(1))
    return simple
