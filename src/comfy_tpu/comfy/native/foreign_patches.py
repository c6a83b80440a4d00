"""Finds changes that other nodes made to a model and that a trace of it would not include."""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator
from typing import Any

import comfy.model_management
import torch

OWN_MARKER = "of_comfy_tpu"
"""An attribute that marks our own patches on a module."""
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
"""What every module has: nothing that replaces a method."""


def loaded_patcher(owner: torch.nn.Module | None) -> Any:
    """The ModelPatcher, of a model's clones, whose patches are applied now; None if there is none."""
    for loaded in comfy.model_management.current_loaded_models:
        if loaded.model is not None and loaded.model.model is owner:
            return loaded.model
    return None


def find_patcher_problem(owner: torch.nn.Module | None) -> str:
    """Why the model cannot be traced with its current patches; empty if it can."""
    patcher = loaded_patcher(owner)
    if patcher is None:
        return ""
    if patcher.current_hooks is not None:
        return "weights are hooked to the prompt or the step, and change while the sampler runs"
    injected = [str(key) for key, injections in patcher.injections.items() if injections]
    if injected:
        return f"another node injects code into the model ({', '.join(injected)})"
    return ""


def find_module_problem(module: torch.nn.Module) -> str:
    """Why the module's code differs from that of its classes; empty if it does not."""
    from comfy_tpu.bridge import named_parts

    for name, part in named_parts(module):
        if reason := _find_part_problem(part):
            return reason.format(".".join(filter(None, (type(module).__name__, name))))
    return ""


def _find_part_problem(part: Any) -> str:
    if part._forward_hooks or part._forward_pre_hooks:
        return "another node put a hook on {}"
    attributes = part.__dict__
    if attributes.get("weight_function") or attributes.get("bias_function"):
        return "another node computes the weights of {} while the model runs"
    for name in attributes.keys() - _MODULE_ATTRIBUTES:
        value = attributes[name]
        if callable(value) and _replaces(part, name, value):
            return f"another node replaced {{}}.{name}"
    return ""


def _replaces(part: torch.nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute of an object replaces a method of its class."""
    own = getattr(type(part), name, None)
    if not callable(own) or hasattr(value, OWN_MARKER):
        return False
    # When a patch is taken off, ComfyUI leaves the class's own method as an attribute behind.
    return not (getattr(value, "__self__", None) is part and getattr(value, "__func__", None) is own)


def module_structure(module: torch.nn.Module) -> Hashable:
    """A key of a module's parts, their code, settings and weight shapes. A program belongs to one structure."""
    from comfy_tpu.bridge import named_parts, named_tensors

    named = named_parts(module)
    parts = [(name, type(part), _printed_settings(part)) for name, part in named]
    code = {function for kind in {kind for _, kind, _ in parts} for function in _functions(kind)}
    weights = ((name, tensor.shape) for name, tensor in named_tensors(named).items())
    return frozenset(parts), frozenset(code), frozenset(weights)


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """The current methods of a class: another node may have replaced some."""
    for each in kind.__mro__:
        if each is torch.nn.Module:
            return
        yield from (value for value in vars(each).values() if isinstance(value, types.FunctionType))


def _printed_settings(part: torch.nn.Module) -> str:
    """The settings that torch prints of a module: the padding of a convolution, the epsilon of a norm."""
    try:
        return part.extra_repr()
    except (AttributeError, TypeError, ValueError, RuntimeError):  # extra_repr of foreign code may fail
        return ""
