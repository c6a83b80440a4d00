"""Iterators that hold weights on the devices, and may be left half read when Python ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")

_unfinished: weakref.WeakSet[Generator[object, None, None]] = weakref.WeakSet()


def closed_at_exit(
    function: Callable[Arguments, Generator[Item, None, None]],
) -> Callable[Arguments, Generator[Item, None, None]]:
    """Generators of this function are closed while modules are still whole. Python itself closes what is left after it
    has emptied them, and what they release their weights with is then None."""

    @functools.wraps(function)
    def make(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Generator[Item, None, None]:
        generator = function(*args, **kwargs)
        _register()
        _unfinished.add(generator)
        return generator

    return make


@functools.cache  # at the first use: importing has no effects; and behind jax's own, so that it runs before them
def _register() -> None:
    atexit.register(_close_unfinished)


def _close_unfinished() -> None:
    for generator in list(_unfinished):
        with contextlib.suppress(ValueError):  # it runs, in another thread
            generator.close()
