"""Reads everything that a callable's result depends on beside its arguments, so that a trace of it can be reused.

Two callables with equal state compute the same: the same code, with equal values in closures, defaults, globals that
the code names, and attributes of the objects it is bound to. What cannot be compared (tensors, modules, generators,
clocks, files) raises UnsupportedError.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import logging
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from comfy_tpu.errors import UnsupportedError

TRUSTED_PACKAGES = frozenset(
    {
        "torch",
        "einops",
        "comfy",
        "comfy_api",
        "comfy_tpu",
        "math",
        "cmath",
        "logging",
        "functools",
        "itertools",
        "typing",
    }
    | {"typing_extensions", "collections", "operator", "re", "enum", "dataclasses", "contextlib", "copy", "types"}
    | {"inspect", "numbers", "abc", "warnings", "string", "statistics", "__future__", "builtins", "bisect", "heapq"}
)
"""Packages whose functions have no state that changes from step to step. Torch's random numbers are refused by the
trace itself."""
FORBIDDEN_BUILTINS = frozenset(
    {"globals", "locals", "vars", "eval", "exec", "open", "input", "compile", "__import__", "breakpoint"}
)
MAX_PARTS = 2000
"""Functions and values in one state; beyond, it is not a patch but an application."""

_VALUES = (bool, int, complex, str, bytes, type(None), type(...), type(NotImplemented), range, torch.Size)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CLASS_BOOKKEEPING = re.compile(r"__\w+__$|_abc_impl$")
_SLOT_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_ABSENT = object()


class Identity:
    """Equal to itself only. Holds the object, so that no other one takes its place in memory."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


@dataclasses.dataclass(frozen=True)
class CallableState:
    """The state of some callables at one moment."""

    key: Hashable
    _saved: tuple[Callable[[], None], ...]

    def restore(self) -> None:
        """Puts every container, closure and attribute back to what it held."""
        for put_back in self._saved:
            put_back()


def read_state(callables: Iterable[Any]) -> CallableState:
    """The state of callables. Raises UnsupportedError if it cannot be compared."""
    reader = _Reader()
    key = tuple(reader.describe(each) for each in callables)
    return CallableState(key, tuple(reader.saved))


def code_identity(value: Any) -> Hashable:
    """A callable's code without its state: the same for the functions that one line of a node makes at every run."""
    value = getattr(value, "__func__", value)
    if isinstance(value, functools.partial):
        return "partial", code_identity(value.func)
    if isinstance(value, (tuple, list)):
        return tuple(code_identity(each) for each in value)
    return Identity(value.__code__ if isinstance(value, types.FunctionType) else type(value))


@dataclasses.dataclass(frozen=True)
class _Names:
    read: frozenset[str]
    """Names of globals and builtins."""
    attributes: frozenset[str]
    imported: frozenset[str]


@functools.lru_cache(1024)
def _names(code: types.CodeType) -> _Names:
    """The names in a function's code and in that of functions inside it."""
    read, imported, attributes = set(), set(), set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"):
            read.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imported.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            read |= inner.read
            attributes |= inner.attributes
            imported |= inner.imported
    return _Names(frozenset(read), frozenset(attributes), frozenset(imported))


def _is_trusted(module_name: str | None) -> bool:
    return (module_name or "").partition(".")[0] in TRUSTED_PACKAGES


class _Reader:
    def __init__(self) -> None:
        self.saved: list[Callable[[], None]] = []
        self._places: dict[int, int] = {}
        self._held: list[object] = []  # so that no id is taken twice

    def describe(self, value: Any) -> Hashable:
        """A key of a value and of all that is reached from it."""
        if isinstance(value, float):
            return float, value.hex()  # tells -0.0 from 0.0, and NaN equals itself
        if isinstance(value, enum.Enum):
            return Identity(value)
        if type(value) in _VALUES or isinstance(value, _TORCH_VALUES):
            return type(value), value
        if isinstance(value, (re.Pattern, logging.Logger)):
            return Identity(value)
        if id(value) in self._places:
            return "met before", self._places[id(value)]
        if len(self._held) >= MAX_PARTS:
            raise UnsupportedError(f"it reaches more than {MAX_PARTS} functions and values")
        self._places[id(value)] = len(self._held)
        self._held.append(value)
        return type(value), self._describe_parts(value)

    def _describe_parts(self, value: Any) -> Hashable:
        if isinstance(value, types.FunctionType):
            return Identity(value) if _is_trusted(value.__module__) else self._function(value)
        if isinstance(value, types.MethodType):
            return self.describe(value.__func__), self.describe(value.__self__)
        if isinstance(value, functools.partial):
            return self.describe(value.func), self.describe(value.args), self.describe(value.keywords)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            return self._builtin(value)
        if isinstance(value, type):
            return Identity(value) if _is_trusted(value.__module__) else self._class(value)
        if isinstance(value, (staticmethod, classmethod)):
            return self.describe(value.__func__)
        if isinstance(value, property):
            return tuple(self.describe(each) for each in (value.fget, value.fset, value.fdel))
        if isinstance(value, slice):
            return tuple(self.describe(each) for each in (value.start, value.stop, value.step))
        return self._container(value)

    def _container(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            return tuple(self.describe(each) for each in value)
        if kind is list:
            before = list(value)
            self.saved.append(lambda: value.__setitem__(slice(None), before))
            return tuple(self.describe(each) for each in before)
        if kind is dict:
            self._save_mapping(value)
            return tuple((self.describe(name), self.describe(each)) for name, each in list(value.items()))
        if kind in (set, frozenset):
            if kind is set:
                members = set(value)
                self.saved.append(lambda: (value.clear(), value.update(members), None)[-1])
            return frozenset(self.describe(each) for each in value)
        return self._object(value)

    def _save_mapping(self, mapping: dict[Any, Any]) -> None:
        before = dict(mapping)

        def put_back() -> None:
            if mapping.keys() != before.keys() or any(mapping[name] is not before[name] for name in before):
                mapping.clear()
                mapping.update(before)

        self.saved.append(put_back)

    def _function(self, function: types.FunctionType) -> Hashable:
        names = _names(function.__code__)
        if unknown := sorted(name for name in names.imported if not _is_trusted(name)):
            raise UnsupportedError(f"{function.__qualname__} imports {unknown[0]}, which may have a state of its own")
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        used = [(name, self._global(function, name, names)) for name in sorted(names.read)]
        attributes = self.describe(vars(function)) if vars(function) else None
        defaults = self.describe(function.__defaults__), self.describe(function.__kwdefaults__)
        return Identity(function.__code__), defaults, tuple(cells), tuple(used), attributes

    def _cell(self, cell: types.CellType) -> Hashable:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            self.saved.append(lambda: cell.__delattr__("cell_contents") if _is_filled(cell) else None)
            return "empty"
        self.saved.append(lambda: setattr(cell, "cell_contents", content))
        return self.describe(content)

    def _global(self, function: types.FunctionType, name: str, names: _Names) -> Hashable:
        space = function.__globals__
        if name not in space:
            if name in FORBIDDEN_BUILTINS:
                raise UnsupportedError(f"{function.__qualname__} calls {name}")
            self.saved.append(lambda: space.pop(name, None))
            return Identity(getattr(builtins, name, None))
        value = space[name]
        self.saved.append(lambda: space.__setitem__(name, value) if space.get(name, _ABSENT) is not value else None)
        if not isinstance(value, types.ModuleType):
            return self.describe(value)
        if "getattr" in names.read and not _is_trusted(value.__name__):
            raise UnsupportedError(f"{function.__qualname__} reads attributes of {value.__name__} by computed names")
        return self._module(value, names)

    def _module(self, module: types.ModuleType, names: _Names) -> Hashable:
        """A Python module: of foreign ones, the attributes with names that the code has."""
        if _is_trusted(module.__name__):
            return Identity(module)
        origin = getattr(module, "__file__", None)
        if origin is None or not origin.endswith(".py") or _is_library(module):
            raise UnsupportedError(f"it uses {module.__name__}, which may give other results at every call")
        parts: list[Hashable] = [Identity(module)]
        for name in sorted(names.attributes & vars(module).keys()):
            value = vars(module)[name]
            self.saved.append(functools.partial(_set_if_changed, module, name, value))
            part = self._module(value, names) if isinstance(value, types.ModuleType) else self.describe(value)
            parts.append((name, part))
        return tuple(parts)

    def _builtin(self, value: Any) -> Hashable:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            home = getattr(value, "__module__", None) or getattr(owner, "__module__", None)
            if not _is_trusted(home):
                raise UnsupportedError(f"it calls {home}.{value.__name__}, which may give other results at every call")
            return Identity(value)
        return value.__name__, self.describe(owner)

    def _class(self, kind: type) -> Hashable:
        parts: list[Hashable] = []
        for each in kind.__mro__:
            if each is object or _is_trusted(each.__module__):
                parts.append(Identity(each))
                continue
            for name, value in sorted(vars(each).items()):
                is_bookkeeping = _CLASS_BOOKKEEPING.match(name) and not isinstance(value, types.FunctionType)
                if not is_bookkeeping and not isinstance(value, _SLOT_DESCRIPTORS):
                    self.saved.append(functools.partial(_set_if_changed, each, name, value))
                    parts.append((name, self.describe(value)))
        return tuple(parts)

    def _object(self, value: Any) -> Hashable:
        kind = type(value)
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            what = "tensors" if isinstance(value, torch.Tensor) else "modules"
            raise UnsupportedError(f"it holds {what} of its own ({kind.__name__})")
        if kind.__module__.partition(".")[0] == "torch" and callable(value):
            return Identity(value)  # an operator
        slots = [name for each in kind.__mro__ for name in _slot_names(each)]
        is_plain = all(each is object or _is_python_class(each) for each in kind.__mro__)
        if _is_trusted(kind.__module__) or slots or not is_plain or not hasattr(value, "__dict__"):
            raise UnsupportedError(f"it holds a {kind.__module__}.{kind.__qualname__}, whose state cannot be compared")
        self._save_mapping(vars(value))
        return self.describe(kind), tuple((name, self.describe(each)) for name, each in list(vars(value).items()))


def _is_python_class(kind: type) -> bool:
    """Whether a class is written in Python, by a model or a node: others keep state where it cannot be read."""
    module = sys.modules.get(kind.__module__)
    if module is None:
        return False
    return str(getattr(module, "__file__", "")).endswith(".py") and not _is_library(module)


def _slot_names(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_library(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] in sys.stdlib_module_names | {"numpy", "scipy", "jax", "PIL", "cv2"}


def _set_if_changed(owner: Any, name: str, value: Any) -> None:
    space: Mapping[str, Any] = vars(owner)
    if space.get(name, _ABSENT) is not value:
        setattr(owner, name, value)
