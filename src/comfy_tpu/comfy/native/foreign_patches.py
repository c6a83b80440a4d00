"""What other nodes did to a model that a trace of it would not show."""

from __future__ import annotations

import itertools
import types
from collections.abc import Hashable, Iterator
from typing import Any

import comfy.model_management
import torch

OURS = "of_comfy_tpu"
"""An attribute of what we put on a module ourselves."""


def loaded_patcher(owner: torch.nn.Module | None) -> Any:
    """The one of a model's clones whose patches are on it now, or None."""
    for loaded in comfy.model_management.current_loaded_models:
        if loaded.model is not None and loaded.model.model is owner:
            return loaded.model
    return None


def reason_in_the_patcher(owner: torch.nn.Module | None) -> str:
    """Why the model cannot be traced as it is patched now, or nothing."""
    patcher = loaded_patcher(owner)
    if patcher is None:
        return ""
    if patcher.current_hooks is not None:
        return "weights are hooked to the prompt or the step, and change while the sampler runs"
    injected = [str(key) for key, injections in patcher.injections.items() if injections]
    if injected:
        return f"another node injects code into the model ({', '.join(injected)})"
    return ""


def reason_in_the_module(module: torch.nn.Module) -> str:
    """Why its own code is not what its classes say, or nothing."""
    for name, part in module.named_modules():
        if reason := _reason_in(part):
            return reason.format(".".join(filter(None, (type(module).__name__, name))))
    return ""


def _reason_in(part: Any) -> str:
    if part._forward_hooks or part._forward_pre_hooks:
        return "another node put a hook on {}"
    attributes = vars(part)
    if attributes.get("weight_function") or attributes.get("bias_function"):
        return "another node computes the weights of {} while the model runs"
    for name, value in attributes.items():
        if callable(value) and _replaces(part, name, value):
            return f"another node replaced {{}}.{name}"
    return ""


def _replaces(part: torch.nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute of an object hides another method of its class."""
    own = getattr(type(part), name, None)
    if not callable(own) or hasattr(value, OURS):
        return False
    # When a patch is taken off, ComfyUI leaves the class's own method as an attribute behind.
    return not (getattr(value, "__self__", None) is part and getattr(value, "__func__", None) is own)


def structure(module: torch.nn.Module) -> Hashable:
    """What a model is made of: its parts and their code, their settings, their weights' shapes. A program is of one."""
    parts = [(name, type(part), _settings(part)) for name, part in module.named_modules()]
    code = {function for kind in {kind for _, kind, _ in parts} for function in _functions(kind)}
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    weights = ((name, tuple(tensor.shape)) for name, tensor in tensors)
    return frozenset(parts), frozenset(code), frozenset(weights)


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """Its methods as they are now: another node may have put others into the class."""
    for each in kind.__mro__:
        if each is torch.nn.Module:
            return
        yield from (value for value in vars(each).values() if isinstance(value, types.FunctionType))


def _settings(part: torch.nn.Module) -> str:
    """As torch prints them: paddings of a convolution, the epsilon of a norm."""
    try:
        return part.extra_repr()
    except (AttributeError, TypeError, ValueError, RuntimeError):  # somebody else's code, for people to read
        return ""
