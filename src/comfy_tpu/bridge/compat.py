"""Importing torchax: on torch versions that it does not know yet, and without changing torch.

torchax 0.0.13 names about twenty operator overloads that torch 2.13 removed (named tensors), and whole operators
that later versions removed, in tables it builds at import. While the import runs, `MissingName` objects replace exactly
those names; with a torchax that knows this torch there are none.

The import also changes torch for everybody else: it renames the PrivateUse1 backend, after which
`torch.accelerator.current_accelerator()` is "jax" (even on a machine with CUDA), switches off the fast path of
`nn.MultiheadAttention`, adds entries to torch's decomposition table and sets an environment variable. None of that
is needed to trace, so all of it is undone. The device of traced tensors is "xla", a name that every torch knows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._decomp

DEVICE = torch.device("xla:0")
"""The `.device` of tensors in a trace."""


class MissingName:
    """Replaces an operator that this torch does not have, as a table key that is never looked up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> MissingName:
        if key.startswith("__"):
            raise AttributeError(key)
        return MissingName(f"{self._name}.{key}")

    def __repr__(self) -> str:
        return f"<missing from torch {torch.__version__}: {self._name}>"


@contextlib.contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _substitute_missing_names(found: list[str]) -> Iterator[None]:
    def substitute_in(owner: Any, describe: Callable[[Any], str]) -> contextlib.AbstractContextManager[None]:
        original = owner.__getattr__

        @functools.wraps(original)
        def __getattr__(self: Any, key: str) -> Any:  # noqa: N807
            try:
                return original(self, key)
            except AttributeError:
                # Others ask too while the import runs (torch's own modules, other threads): they get torch's answer.
                asking = sys._getframe(1).f_globals.get("__name__", "")
                name = f"{describe(self)}.{key}"
                if key.startswith("__") or asking.split(".")[0] != "torchax" or not name.startswith("aten."):
                    raise
                found.append(name)
                return MissingName(name)

        return replace_attribute(owner, "__getattr__", __getattr__)

    overloads = substitute_in(torch._ops.OpOverloadPacket, str)
    operators = substitute_in(torch._ops._OpNamespace, lambda namespace: namespace.name)
    with overloads, operators:
        yield


@contextlib.contextmanager
def _preserve_torch() -> Iterator[None]:
    fastpath = torch.backends.mha.get_fastpath_enabled()
    environment = set(os.environ)
    decompositions = {kind: set(table) for kind, table in torch._decomp.global_decomposition_table.items()}
    without_renaming = replace_attribute(torch.utils, "rename_privateuse1_backend", lambda name: None)
    without_registering = replace_attribute(torch, "_register_device_module", lambda device_type, module: None)
    try:
        with without_renaming, without_registering:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for name in set(os.environ) - environment:
            del os.environ[name]
        for kind, table in torch._decomp.global_decomposition_table.items():
            for added in set(table) - decompositions[kind]:
                del table[added]


def _patch_torchax(tensor: types.ModuleType, view: types.ModuleType) -> None:
    """Corrects operators of torchax 0.0.13 whose results differ from torch's."""
    tensor.Tensor.device = view.View.device = property(lambda self: DEVICE)
    # torchax changes the dtype of its operand in place; torch returns a converted copy.
    tensor.Tensor.type_as = lambda self, other: self.to(other.dtype)


_lock = threading.Lock()
_torchax: types.ModuleType | None = None
substituted_names: list[str] = []
"""The names that were substituted when torchax was loaded; empty with a torchax that knows this torch."""


def load_torchax() -> types.ModuleType:
    """torchax, imported once per process, ready to use."""
    global _torchax
    with _lock:
        if _torchax is None:
            if "torchax" not in sys.modules:
                # Modules left by an import that failed half-way would be taken for the complete package.
                for name in [name for name in sys.modules if name.startswith("torchax.")]:
                    del sys.modules[name]
            with _preserve_torch(), _substitute_missing_names(substituted_names):
                module = importlib.import_module("torchax")
                for name in (
                    "tensor",
                    "view",
                    "decompositions",
                    "ops.jaten",
                    "ops.jtorch",
                    "ops.ops_registry",
                    "ops.mappings",
                ):
                    importlib.import_module(f"torchax.{name}")
            _forget_missing_names()
            _patch_torchax(module.tensor, module.view)
            _torchax = module
        return _torchax


def _forget_missing_names() -> None:
    for module, table in (
        ("amp", "autocast_policy"),
        ("decompositions", "DECOMPOSITIONS"),
        ("ops.ops_registry", "all_aten_ops"),
        ("ops.ops_registry", "all_torch_functions"),
    ):
        entries = getattr(importlib.import_module(f"torchax.{module}"), table)
        for key in [key for key in entries if isinstance(key, MissingName)]:
            del entries[key]
