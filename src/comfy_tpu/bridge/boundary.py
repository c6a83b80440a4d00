"""The boundary between host tensors and device arrays: nested structures are converted, and dtypes are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Sharding
from torch.utils.dlpack import from_dlpack

from comfy_tpu.bridge.dtypes import as_numpy, as_tensor, check_integer_range
from comfy_tpu.bridge.environment import DeviceTensor
from comfy_tpu.errors import EscapeError, device_errors
from comfy_tpu.parallel.global_arrays import fetch_global, put_global

_ALIASED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that jax takes over as they are: of integers the range is checked on the host."""


def is_on_one_gpu(sharding: Sharding | Any) -> bool:
    devices: list[Any] = list(sharding.device_set) if isinstance(sharding, Sharding) else []
    return [device.platform for device in devices] == ["gpu"]


def alias_torch_tensor(tensor: torch.Tensor, sharding: Sharding) -> jax.Array:
    """A jax array over the memory of a torch tensor on the single device of `sharding`; nothing is copied."""
    return jax.device_put(jax.dlpack.from_dlpack(tensor.detach().contiguous()), sharding)


def to_device(tree: Any, sharding: Sharding | Any = None) -> Any:
    """Converts torch tensors and numpy arrays in nested containers to jax arrays; other leaves are returned unchanged.

    The arrays never share memory with `tree`: jax on CPU would alias the tensors (measured, also with
    `may_alias=False`), and a node that later writes into its tensor would change the program's input.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.is_cuda and leaf.dtype in _ALIASED and is_on_one_gpu(sharding):
                return alias_torch_tensor(leaf.clone(memory_format=torch.contiguous_format), sharding)
            leaf = as_numpy(leaf)
        if isinstance(leaf, np.ndarray):
            check_integer_range(leaf)
            return put_global(np.array(leaf), sharding)
        return leaf

    return jax.tree.map(move, tree, is_leaf=_is_tensor)


def to_host(tree: Any, *, consume: bool = False) -> Any:
    """Converts jax arrays in nested containers to writable torch CPU tensors; other leaves are returned unchanged.

    `consume=True` promises that the arrays are not used again: on CPU the tensor then takes over their memory. Arrays
    that are split over several processes are gathered, so that all of them must call this.
    """

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        leaf = fetch_global(leaf)
        if all(device.platform == "cpu" for device in leaf.devices()):
            # Shares memory with the array unless copied; several devices have no single memory to share.
            return from_dlpack(leaf) if consume and len(leaf.devices()) == 1 else as_tensor(np.array(leaf))
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS=tpu leaves jax no CPU to copy to
            return as_tensor(np.array(leaf))
        return from_dlpack(jax.device_put(leaf, host))

    with device_errors("what was to be computed"):  # programs run on after they were called, and may fail only here
        return jax.tree.map(fetch, tree)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray))


def check_host_data(value: Any, where: str = "result") -> None:
    """Raises EscapeError if `value`, or anything nested in it, is a device tensor, a traced value or a live model."""
    if isinstance(value, (DeviceTensor, jax.Array, torch.nn.Module)):
        raise EscapeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, expected host data; use to_host()"
        )
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise EscapeError(f"{where} is a tensor on {value.device}, expected one on cpu; use to_host()")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_host_data(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            check_host_data(item, f"{where}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            check_host_data(getattr(value, field.name), f"{where}.{field.name}")
