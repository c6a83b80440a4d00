"""The one torchax environment of the process: torchax's operators, ours over them, and stricter manners."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from comfy_tpu.bridge.compat import load_torchax, replaced
from comfy_tpu.bridge.dtypes import as_numpy, check_integer_range
from comfy_tpu.bridge.model_source import calling_line
from comfy_tpu.bridge.operators import OPERATORS, Operator, load_operators
from comfy_tpu.errors import MissingOperatorError, TraceError

torchax = load_torchax()

DeviceTensor: tuple[type, ...] = (torchax.tensor.Tensor, torchax.view.View)
"""What torch tensors are while a model is traced; nothing of these types may outlive the trace."""

CONSTANT_BYTES_MAX = 64 * 2**20
# A host tensor that meets a traced one becomes a constant of the program. Programs are stored whole in the compile
# cache, so a constant of weight size is a mistake: it should have been an input.


class _MissingOperatorError(MissingOperatorError, torchax.tensor.OperatorNotFound):  # type: ignore[name-defined]
    """torchax's function mode catches its own exception to try the operator's ATen form, so ours must be one too."""


_RANDOM = {
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randn,
    torch.randn_like,
    torch.randperm,
    torch.Tensor.bernoulli_,
    torch.Tensor.normal_,
    torch.Tensor.random_,
    torch.Tensor.uniform_,
}
# Also on the host: what is drawn there while tracing becomes a constant as well.


class _NoRandomness(threading.local):
    """In place of torchax's holder of a random key, which compiles a program to make a key that no trace may use."""

    def __init__(self, content_factory: Callable[[], Any]) -> None:
        self.content = torchax.tensor.RuntimeProperty(mesh=None, prng=None, autocast_dtype=None)


class TraceEnvironment(torchax.tensor.Environment):  # type: ignore[name-defined]
    def __init__(self) -> None:
        with replaced(torchax.tensor, "_PropertyHolder", _NoRandomness):
            super().__init__()
        load_operators()
        for entry in OPERATORS.values():
            self.install(entry)

    def install(self, entry: Operator) -> None:
        self._ops[entry.target] = torchax.ops.ops_registry.Operator(
            torch_op=entry.target,
            func=entry.function,
            is_jax_function=not entry.on_torch,
            is_user_defined=True,
            needs_env=False,
            is_view_op=entry.on_torch,
        )

    def as_torch(self, tree: Any) -> Any:
        return self.j2t_iso(tree)

    def as_jax(self, tree: Any) -> Any:
        return self.t2j_iso(tree)

    def t2j_iso(self, torchtensors: Any) -> Any:
        def unwrap(tensor: torch.Tensor) -> Any:
            return tensor.jax() if isinstance(tensor, DeviceTensor) else self._constant(tensor)  # type: ignore[attr-defined]

        return torch.utils._pytree.tree_map_only(torch.Tensor, unwrap, torchtensors)

    def t2j_copy(self, args: Any) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._constant, args)

    def _constant(self, tensor: torch.Tensor) -> jax.Array:
        if tensor.device.type == "meta":
            raise TraceError(
                f"a meta tensor of shape {tuple(tensor.shape)} has no data but was used{calling_line()}: it is neither "
                "a weight nor a buffer that was loaded; register it as a buffer, or pass it as an input"
            )
        if tensor.nbytes > CONSTANT_BYTES_MAX:
            raise TraceError(
                f"a host tensor of {tensor.nbytes / 2**20:.0f} MiB, shape {tuple(tensor.shape)}, was used"
                f"{calling_line()}; constants of a program may have {CONSTANT_BYTES_MAX / 2**20:.0f} MiB: pass it "
                "as an input"
            )
        array = as_numpy(tensor)
        check_integer_range(array)
        return jnp.array(array)  # a copy: the program must not change when the tensor does

    def _should_use_torchax_tensor(self, device: Any) -> bool:
        device = torch.get_default_device() if device is None else torch.device(device)
        return device.type != "cpu"

    def _is_same_device(self, the_tensor: torch.Tensor, new_device: str | None) -> bool:
        # In a trace there is one place to be: moving a traced tensor anywhere keeps it where it is.
        return isinstance(the_tensor, DeviceTensor) or new_device in (None, "cpu")

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _RANDOM:
            self.get_and_rotate_prng_key()
        return super().dispatch(func, types, args, kwargs)

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> jax.Array:
        raise TraceError(
            f"random numbers were drawn{calling_line()}: in a compiled program they would be the same in every run; "
            "draw them outside and pass them as an input"
        )

    def _get_op_or_decomp(self, func: Any) -> Any:
        try:
            return super()._get_op_or_decomp(func)
        except torchax.tensor.OperatorNotFound:
            name = (
                str(func)
                if isinstance(func, torch._ops.OpOverload)
                else torch.overrides.resolve_name(func) or str(func)
            )
            target = name if name.startswith("torch.") else f"torch.ops.{name}"
            raise _MissingOperatorError(
                f"operator {name} is not implemented by torchax or comfy-tpu; it was called{calling_line()}; "
                f"add `@operator({target})` over a function on jax arrays in comfy_tpu/bridge/operators/"
            ) from None


_environment: TraceEnvironment | None = None
_lock = threading.Lock()


def environment() -> TraceEnvironment:
    global _environment
    with _lock:
        if _environment is None:
            _environment = TraceEnvironment()
        return _environment
