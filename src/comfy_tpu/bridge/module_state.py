"""State that a model keeps between calls: tensors of a trace must not stay in it."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_LruCache = type(functools.lru_cache(lambda: None))
_EMPTY = types.CellType()  # compared with it, a cell says whether it has contents


@contextlib.contextmanager
def restore_module_state(module: torch.nn.Module) -> Iterator[None]:
    """Restores the module's attributes at the end of the block (a VAE's frame cache), and clears functools' caches in
    the files that define its classes (Qwen-Image's RoPE)."""
    contents: dict[int, tuple[Any, Any]] = {}
    for owner in module.modules():
        _save_container(vars(owner), contents, type(owner).__module__)
    try:
        yield
    finally:
        # In place, so that containers shared by two modules stay shared.
        for container, content in contents.values():
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for file in {type(owner).__module__ for owner in module.modules()}:
            for cache in _find_caches(file):
                cache.cache_clear()


def _save_container(container: Any, contents: dict[int, tuple[Any, Any]], file: str) -> None:
    if type(container) not in (dict, list, collections.OrderedDict) or id(container) in contents:
        return
    contents[id(container)] = (container, container.copy())
    for item in container.values() if isinstance(container, dict) else container:
        # A plain object counts as the module's own if the same file defines it: Z-Image's RopeEmbedder.
        own = type(item).__module__ == file and not isinstance(item, torch.nn.Module) and hasattr(item, "__dict__")
        _save_container(vars(item) if own else item, contents, file)


def _find_caches(file: str) -> Iterator[Any]:
    """functools' caches of the functions and methods that a file defines; those it imports are not included."""
    if file not in sys.modules or file.startswith("torch."):
        return
    things = list(vars(sys.modules[file]).values())
    for each in list(things):
        if isinstance(each, type) and each.__module__ == file:
            things += vars(each).values()
    for thing in things:
        within = thing.__closure__ or () if isinstance(thing, types.FunctionType) else ()  # a decorator's
        for each in (thing, *(cell.cell_contents for cell in within if cell != _EMPTY)):
            if isinstance(each, _LruCache) and each.__module__ == file:
                yield each
