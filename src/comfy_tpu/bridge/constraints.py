"""Sharding constraints that can be written on torch tensors inside a model."""

from __future__ import annotations

import contextlib

import jax
import torch

from comfy_tpu.bridge.environment import DeviceTensor, environment
from comfy_tpu.bridge.scope import current_trace
from comfy_tpu.parallel.constraints import constrain as constrain_array
from comfy_tpu.parallel.constraints import even_batch_spec


def constrain(tensor: torch.Tensor, *axes: str | tuple[str, ...] | None, name: str = "") -> torch.Tensor:
    """Constrains `tensor` to be split over the mesh: an axis name (or several, or None) per dimension.

    `constrain(hidden_states, "dp", "sp", None)`. Outside a trace, and on one device, the tensor is returned unchanged,
    so the model can still be run by torch. A batch that dp does not divide is not split. `name`: that of the operation
    in the traced program, by which `planning/causes.py` knows the collective that it becomes.
    """
    if not isinstance(tensor, DeviceTensor):
        return tensor
    placement = current_trace().placement
    if placement is None:
        return tensor
    bridge = environment()
    spec = even_batch_spec(axes, tuple(tensor.shape), placement)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        constrained: torch.Tensor = bridge.as_torch(constrain_array(bridge.as_jax(tensor), placement, spec))
    return constrained
