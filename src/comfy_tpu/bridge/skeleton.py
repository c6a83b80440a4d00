"""Modules without weights: structure and small computed buffers only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from comfy_tpu.config import SkeletonLimits
from comfy_tpu.errors import SkeletonSizeError


def skeleton_limits(shapes: Iterable[tuple[int, ...]]) -> SkeletonLimits:
    """Limits for a module whose checkpoint holds tensors of these shapes, with room for modules that allocate tied
    weights twice, or drop layers afterwards."""
    sizes = [math.prod(shape) for shape in shapes]
    known = f"and its checkpoint has {len(sizes)} with {sum(sizes)} numbers"
    return SkeletonLimits(tensors=4 * len(sizes) + 256, elements=4 * sum(sizes) + 2**20, error_suffix=known)


_FACTORIES = (torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn, torch.zeros)
_LARGE_INPUT_ELEMENTS = 2**12
"""From this many elements of an input on, the size of a result is checked before it is computed."""


class _EmptyOnMeta(TorchFunctionMode):
    """Puts tensors made by torch.empty, which are the weights, on meta; computed tensors (RoPE tables) are real.

    A mode rather than a `torch.device("meta")` block, which would lose the computed buffers, and rather than a patch of
    nn.Module, which would affect other threads.
    """

    def __init__(self, limits: SkeletonLimits) -> None:
        super().__init__()
        self._limits = limits
        self._tensors = 0
        self._elements = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
            weight = func(*args, **kwargs)
            self._count(weight)
            return weight
        largest = max((each.numel() for each in args if isinstance(each, torch.Tensor) and not each.is_meta), default=0)
        with contextlib.suppress(NotImplementedError, RuntimeError, TypeError):  # not every function works on meta
            if func in _FACTORIES:
                self._check_computed(func(*args, **{**kwargs, "device": "meta"}), largest)
            elif largest >= _LARGE_INPUT_ELEMENTS:
                on_meta = (each.to("meta") if isinstance(each, torch.Tensor) else each for each in args)
                self._check_computed(func(*on_meta, **kwargs), largest)
        return func(*args, **kwargs)

    def _count(self, weight: torch.Tensor) -> None:
        self._tensors += 1
        self._elements += weight.numel()
        if self._tensors > self._limits.tensors:
            raise SkeletonSizeError(f"asks for more than {self._limits.tensors} weights, {self._limits.error_suffix}")
        if self._elements > self._limits.elements:
            elements = self._limits.elements
            raise SkeletonSizeError(f"asks for weights with more than {elements} numbers, {self._limits.error_suffix}")

    def _check_computed(self, tensor: Any, largest: int) -> None:
        """Raises SkeletonSizeError for a result that is too large; `largest`: elements of its largest input."""
        if isinstance(tensor, torch.Tensor) and tensor.numel() > max(self._limits.computed, largest):
            raise SkeletonSizeError(f"asks for a table of shape {tuple(tensor.shape)}, which no known model has")


@contextlib.contextmanager
def _preserve_random_state() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def build_skeleton(
    factory: Callable[[], torch.nn.Module], limits: SkeletonLimits = SkeletonLimits()
) -> torch.nn.Module:
    """The module that `factory` builds, in eval mode: weights on meta, computed buffers real and on the host.

    Buffers that a checkpoint does not hold (persistent=False) become constants of the programs traced from it. Raises
    SkeletonSizeError as soon as the module asks for more than `limits`.
    """
    with torch.inference_mode(False):  # a module built inside one could not be used outside of it
        return _build_on_meta(factory, limits)


def _build_on_meta(factory: Callable[[], torch.nn.Module], limits: SkeletonLimits) -> torch.nn.Module:
    with _preserve_random_state(), torch.no_grad(), _EmptyOnMeta(limits):
        module = factory()
    emptied: dict[int, torch.nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                # One object per original, so that tied weights stay tied.
                empty = emptied.setdefault(id(parameter), torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
                owner._parameters[name] = empty
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = buffer.to("meta")
    return module.eval()


def weight_shapes(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint must hold: parameters and persistent buffers, tied ones once, by the first name."""
    kept = set(module.state_dict(keep_vars=True))
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if name in kept}
