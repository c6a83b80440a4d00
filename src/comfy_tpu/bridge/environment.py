"""The torchax environment of the process: torchax's operators, the overrides in `operators`, views that share memory,
and errors where torchax would silently compute something else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from comfy_tpu.bridge.aliasing import (
    Kind,
    custom_definition,
    find_recipes,
    operator_kind,
    result_layout,
    returns_sequence,
)
from comfy_tpu.bridge.compat import load_torchax, replace_attribute
from comfy_tpu.bridge.dtypes import as_numpy, check_integer_range, numpy_dtype
from comfy_tpu.bridge.layouts import ROW_MAJOR, copy_layout, is_row_major, layout_strides, view_layout
from comfy_tpu.bridge.memory import (
    get_item,
    make_view,
    mark_possible_alias,
    patch_tensor_class,
    rebind_memory,
    set_item,
)
from comfy_tpu.bridge.model_source import calling_line
from comfy_tpu.bridge.operators import OPERATORS, Operator, load_operators
from comfy_tpu.bridge.recipes import Reshape, Selection
from comfy_tpu.errors import MissingOperatorError, TraceError, see

torchax = load_torchax()

DeviceTensor: tuple[type, ...] = (torchax.tensor.Tensor,)
"""The types of torch tensors while a model is traced; none of them may outlive the trace. torchax's own `View`, which
supports slices only, is not used."""

CONSTANT_BYTES_MAX = 64 * 2**20
# A host tensor that meets a traced one becomes a constant of the program. Programs are stored whole in the compile
# cache, so a constant of weight size is a mistake: it should have been an input.


class _MissingOperatorError(MissingOperatorError, torchax.tensor.OperatorNotFound):  # type: ignore[name-defined]
    """torchax's function mode catches its own exception to try the operator's ATen form, so ours must be one too."""


_RANDOM_OPERATORS = {
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


class _NoRandomKey(threading.local):
    """Replaces torchax's `_PropertyHolder`, which compiles a program to make a random key that no trace may use."""

    def __init__(self, content_factory: Callable[[], Any]) -> None:
        self.content = torchax.tensor.RuntimeProperty(mesh=None, prng=None, autocast_dtype=None)


class TraceEnvironment(torchax.tensor.Environment):  # type: ignore[name-defined]
    def __init__(self) -> None:
        with replace_attribute(torchax.tensor, "_PropertyHolder", _NoRandomKey):
            super().__init__()
        self._exact = False
        # torchax implements these two as copies; in torch they share memory, which `aliasing` handles.
        del self._ops[torch.tensor_split], self._ops[torch.Tensor.resize_]
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
                f"{see('meta-tensor')}"
            )
        if tensor.nbytes > CONSTANT_BYTES_MAX:
            raise TraceError(
                f"a host tensor of {tensor.nbytes / 2**20:.0f} MiB, shape {tuple(tensor.shape)}, was used"
                f"{calling_line()}; constants of a program may have {CONSTANT_BYTES_MAX / 2**20:.0f} MiB: pass it "
                f"as an input{see('large-constant')}"
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
        if func in _RANDOM_OPERATORS:
            self.get_and_rotate_prng_key()
        kwargs = kwargs or {}
        method = _METHODS.get(func)
        if method is not None and isinstance(args[0], torchax.tensor.Tensor):
            return method(self, func, args, kwargs)
        definition = custom_definition(func)
        if definition is not None:
            # A custom operator that is written in Python: run its definition, whose operators are known.
            with self:
                return definition(*args, **kwargs)
        kind = operator_kind(func)
        if kind is Kind.PLAIN:
            return self._compute(func, types, args, kwargs)
        if kind is Kind.WRITES_OUT:
            return self._dispatch_out(func, args, kwargs)
        if not isinstance(args[0], torchax.tensor.Tensor):
            return super().dispatch(func, types, args, kwargs)
        if kind is Kind.WRITES:
            return self._dispatch_write(func, types, args, kwargs)
        if kind is Kind.CHANGES_SHAPE:
            rebind_memory(args[0], self._functional(func)(*args, **kwargs))
            return args[0]
        if kind is Kind.CONVERTS:
            return self._torch_Tensor_to(args, kwargs)
        if kind is Kind.SAME_ORDER:
            return self._dispatch_reshape(func, types, args, kwargs)
        return self._dispatch_view(func, types, args, kwargs)

    def _compute(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().dispatch(func, types, args, kwargs)
        operator = self._ops.get(func) or self._ops.get(getattr(func, "overloadpacket", None))
        if operator is not None and operator.is_jax_function:  # otherwise the operators that it is made of did this
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            result = self._promote_like_torch(func, result, leaves)
            tensors = [(t._layout, t._value.shape) for t in leaves if isinstance(t, torchax.tensor.Tensor)]
            for leaf in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(leaf, torchax.tensor.Tensor):
                    leaf._layout = result_layout(func, tensors)
        return result

    def _promote_like_torch(self, func: Any, result: Any, operands: list[Any]) -> Any:
        """Gives the result torch's dtype: bfloat16 with a zero-dimensional float32 tensor is bfloat16 in torch, float32
        in jax."""
        if not isinstance(result, torchax.tensor.Tensor) or not result.is_floating_point():
            return result
        tensors = [each for each in operands if isinstance(each, torch.Tensor)]
        dtypes = [each.dtype for each in tensors if each.ndim > 0]
        if len(tensors) == len(dtypes) or not dtypes or torch.Tag.pointwise not in getattr(func, "tags", ()):
            return result
        dtype = functools.reduce(torch.promote_types, dtypes)
        if not dtype.is_floating_point or dtype.itemsize >= result.dtype.itemsize:
            return result
        return torchax.tensor.Tensor(result._elem.astype(numpy_dtype(dtype)), self)

    def _dispatch_view(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        parent: Any = args[0]
        recipes = find_recipes(func, tuple(parent._value.shape), args[1:], kwargs)
        if recipes is not None:
            views = [make_view(parent, recipe) for recipe in recipes]
            return views if returns_sequence(func) else views[0]
        result = super().dispatch(func, types, args, kwargs)
        if any(view._memory is parent._memory for view in (result if isinstance(result, (tuple, list)) else [result])):
            return result  # torchax decomposed it into views, which share the memory already
        operator = self._get_op_or_decomp(func)
        if func is torch.ops.aten.as_strided.default and (parent._recipes or parent._layout != ROW_MAJOR):
            raise TraceError(
                f"as_strided of a view{calling_line()}: a trace knows no strides; use views and slices"
                f"{see('shared-memory')}"
            )
        if returns_sequence(func) or not operator.is_jax_function or result.dtype != parent.dtype:
            raise TraceError(
                f"a trace does not know what {func} is a view of{calling_line()}; use views and slices"
                f"{see('shared-memory')}"
            )
        return make_view(parent, Selection(lambda array: operator.func(array, *args[1:], **kwargs)), result)

    def _dispatch_reshape(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        parent: Any = args[0]
        exact, self._exact = self._exact, False
        result = super().dispatch(func, types, args, kwargs)
        if result._memory is parent._memory:
            return result
        shape = tuple(result._value.shape)
        possible, layout = view_layout(parent._layout, tuple(parent._value.shape), shape)
        if possible or exact:
            make_view(parent, Reshape(shape), result, layout)
        elif possible is None:
            mark_possible_alias(parent, result, "reshape")
        return result

    def _functional(self, func: Any) -> Any:
        """The operator that computes what `func` writes."""
        name = func.overloadpacket.__name__
        packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else func.overloadpacket

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._dispatch_mode:
                return packet(*args, **kwargs)  # type: ignore[misc]

        return run if packet is not None else None

    def _dispatch_write(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            operator = self._get_op_or_decomp(func)
        except torchax.tensor.OperatorNotFound:
            operator, functional = None, self._functional(func)
            if functional is None:
                raise
        if operator is not None and not operator.is_jax_function:
            return super().dispatch(func, types, args, kwargs)
        value = super().dispatch(func, types, args, kwargs) if operator is not None else functional(*args, **kwargs)
        args[0]._elem = value._elem
        return args[0]

    def _dispatch_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        outs = tuple(kwargs[name] for name in names)
        values = self._functional(func)(*args, **{name: kwargs[name] for name in kwargs if name not in names})
        for out, value in zip(outs, values if isinstance(values, (tuple, list)) else (values,), strict=True):
            if out._elem.shape == value._elem.shape:
                out._elem = value._elem
            elif out.numel() == 0:
                rebind_memory(out, torchax.tensor.Tensor(value._elem.astype(out._elem.dtype), self))
            else:
                raise TraceError(
                    f"out= has shape {tuple(out.shape)}, and the result {tuple(value.shape)}{calling_line()}; torch is "
                    "about to refuse this too: give a tensor of the result's shape"
                )
        return outs[0] if len(outs) == 1 else outs

    def _torch_Tensor_to(self, args: Any, kwargs: Any) -> Any:  # noqa: N802
        source = args[0]
        result = super()._torch_Tensor_to(args, kwargs)
        if not isinstance(source, torchax.tensor.Tensor):
            return result
        flags = [arg for arg in args[1:] if isinstance(arg, bool)]
        memory_format = kwargs.get("memory_format") or torch.preserve_format
        if result is source and not (kwargs.get("copy") or (len(flags) > 1 and flags[1])):
            return source if memory_format in _PLAIN_FORMATS else self._change_memory_format(source, memory_format)
        if result is source:
            result = torchax.tensor.Tensor(source._elem, self)
        kept = copy_layout(source._layout, tuple(source._value.shape))
        result._layout = kept if memory_format is torch.preserve_format else None
        return result

    def _change_memory_format(self, source: Any, memory_format: torch.memory_format) -> Any:
        result = torchax.tensor.Tensor(source._elem, self)
        result._layout = None
        mark_possible_alias(source, result, "a conversion of memory format")
        return result

    def _set_item(self, func: Any, args: Any, kwargs: Any) -> None:
        set_item(*args)

    def _get_item(self, func: Any, args: Any, kwargs: Any) -> Any:
        return get_item(*args)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        # `view` raises where it cannot be one, `reshape` copies; both come as aten.view, so note which it was.
        self._exact = True
        try:
            return func(*args, **kwargs)
        finally:
            self._exact = False

    def _contiguous(self, func: Any, args: Any, kwargs: Any) -> Any:
        source: Any = args[0]
        memory_format = (*args[1:], *kwargs.values(), torch.contiguous_format)[0]
        if memory_format not in _PLAIN_FORMATS:
            return self._change_memory_format(source, memory_format)
        row_major = is_row_major(source._layout, tuple(source._value.shape))
        if row_major:
            return source
        result = torchax.tensor.Tensor(source._elem, self)
        if row_major is None:
            mark_possible_alias(source, result, "contiguous")
        return result

    def _is_contiguous(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = is_row_major(args[0]._layout, tuple(args[0]._value.shape))
        return func(*args, **kwargs) if known is None or len(args) > 1 or kwargs else known

    def _stride(self, func: Any, args: Any, kwargs: Any) -> Any:
        strides = layout_strides(args[0]._layout, tuple(args[0]._value.shape))
        if strides is None:
            return func(*args, **kwargs)
        return strides[(*args[1:], *kwargs.values())[0]] if len(args) > 1 or kwargs else strides

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> jax.Array:
        raise TraceError(
            f"random numbers were drawn{calling_line()}: in a compiled program they would be the same in every run; "
            f"draw them outside and pass them as an input{see('random-in-forward')}"
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
                f"{see('missing-operator')}"
            ) from None


_PLAIN_FORMATS = (torch.preserve_format, torch.contiguous_format)
_METHODS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: TraceEnvironment._get_item,
    torch.Tensor.__setitem__: TraceEnvironment._set_item,
    torch.Tensor.contiguous: TraceEnvironment._contiguous,
    torch.Tensor.is_contiguous: TraceEnvironment._is_contiguous,
    torch.Tensor.stride: TraceEnvironment._stride,
    torch.Tensor.view: TraceEnvironment._view,
}
"""Methods whose behaviour in torch is lost when they are dispatched as ATen operators."""

_environment: TraceEnvironment | None = None
_lock = threading.Lock()


def environment() -> TraceEnvironment:
    global _environment
    with _lock:
        if _environment is None:
            patch_tensor_class(torchax.tensor)
            _environment = TraceEnvironment()
        return _environment
