"""MiniMax H3: a program for one layout of text, sound and video, with the step's time as an argument.

The model reads the time as a Python number, to find out which tokens have the same. In a trace it reads a placeholder,
and where it makes a tensor of the times, the tensor has the traced ones. Tokens whose times happen to be equal have a
row each then, with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from comfy_tpu.errors import UnsupportedError

PAYLOAD = "minimax_payload"
MODELS = frozenset({"MiniMaxH3Model"})
_CONDITIONS = ("keyframes", "refs")


def split_payload(arguments: dict[str, Any]) -> tuple[Hashable, dict[str, Any]]:
    """Removes the payload from the arguments; its part that decides on the program, with a key."""
    payload = arguments.pop(PAYLOAD, None) or {}
    conditions = [name for name in _CONDITIONS if payload.get(name)]
    if conditions:
        raise UnsupportedError(
            f"MiniMax H3 draws noise for its {' and '.join(conditions)} in every step, which a compiled program "
            "cannot do; text to video runs on the TPU"
        )
    layout, tags = payload.get("layout"), payload.get("text_token_tags")
    if layout is None:
        raise UnsupportedError("MiniMax H3 was given no layout of its tokens; sample a video with sound")
    key = (layout.signature, tuple(layout.segments), None if tags is None else tuple(tags.flatten().tolist()))
    return key, {PAYLOAD: {"layout": layout, "text_token_tags": tags}}


@functools.cache
def with_traced_times(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a trace in which the model may read a tensor as a number."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with TracedTimes():
            return function(*args)

    return run


class TracedTimes(TorchFunctionMode):
    """Inside a trace: `float(tensor)` is a placeholder, and `torch.tensor` of placeholders has the tensors' values."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[float, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.__float__:
            (tensor,) = args
            placeholder = -(len(self._tensors) + 1) / 7
            self._tensors[placeholder] = tensor
            return placeholder
        if func is torch.tensor and self._tensors.keys() >= set(args[0]):
            return torch.stack([self._tensors[time] for time in args[0]]).to(**kwargs)
        if func is torch.ops.comfy_kitchen.rms_rope_split_half_:
            return _rotate_in_place(*args, **kwargs)
        if any(isinstance(leaf, float) and leaf in self._tensors for leaf in (*args, *kwargs.values())):
            raise UnsupportedError("the model computes with the step's time as a number")
        return func(*args, **kwargs)


def _rotate_in_place(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """As ComfyUI's own, which first compares where the operands are in memory: traced tensors are nowhere."""
    rotated = torch.ops.comfy_kitchen.rms_rope_split_half(q, k, *args, **kwargs)
    for tensor, result in zip((q, k), rotated, strict=True):
        tensor.copy_(result)
