"""Generators that hold weights on the devices, and may be unfinished when Python exits."""

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


def close_at_exit(
    function: Callable[Arguments, Generator[Item, None, None]],
) -> Callable[Arguments, Generator[Item, None, None]]:
    """Closes unfinished generators of the function at exit, while modules are still usable.

    Python itself closes them after it has cleared all modules, when the functions that release weights are None.
    """

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
