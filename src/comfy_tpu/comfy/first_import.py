"""The first import of JAX, when a node of ours runs for the first time."""

from __future__ import annotations

import functools

import numpy


@functools.cache
def import_jax() -> None:
    """Imports JAX and restores numpy's global random state.

    JAX (0.10) draws from the generator while it is imported, and another node may have seeded it.
    """
    state = numpy.random.get_state()
    try:
        import jax  # noqa: F401
    finally:
        numpy.random.set_state(state)
