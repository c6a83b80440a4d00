"""Modules without weights: structure and small computed buffers only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _EmptyOnMeta(TorchFunctionMode):
    """Storage for weights is asked for with torch.empty; what is computed (RoPE tables and the like) is not.

    A mode rather than a `torch.device("meta")` block, which would lose the computed buffers, and rather than a patch
    of nn.Module, which other threads would feel.
    """

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
        return func(*args, **kwargs)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def build_skeleton(factory: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The module that `factory` builds, in eval mode: weights on meta, computed buffers real and on the host.

    Buffers that a checkpoint does not hold (persistent=False) become constants of the programs traced from it.
    """
    with torch.inference_mode(False):  # a module built inside one could not be used outside of it
        return _emptied(factory)


def _emptied(factory: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with _random_state_kept(), torch.no_grad(), _EmptyOnMeta():
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
    """Everything a checkpoint must bring: parameters and persistent buffers, each tied one once, by its first name."""
    kept = set(module.state_dict(keep_vars=True))
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if name in kept}
