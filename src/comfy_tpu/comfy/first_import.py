"""The first import of JAX: when a node of ours runs for the first time, between nodes of others."""

from __future__ import annotations

import functools

import numpy


@functools.cache
def import_jax() -> None:
    """Leaves numpy's global generator where it was: JAX draws from it while it is imported (0.10, for the pauses
    between its attempts to find a cluster), and another node may have seeded it."""
    state = numpy.random.get_state()
    try:
        import jax  # noqa: F401
    finally:
        numpy.random.set_state(state)
