"""Small functions of arrays, compiled once for all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from comfy_tpu.compiler.cache import watch_cache
from comfy_tpu.compiler.stored.store import ProgramStore


def compile_function(
    store: ProgramStore | None,
    name: str,
    function: Callable[..., Any],
    arguments: tuple[jax.ShapeDtypeStruct, ...],
    mesh: Mesh | AbstractMesh,
    **options: Any,
) -> Callable[..., Any]:
    """`function` compiled for arrays on `mesh`; `options` are those of `jax.jit`."""
    shardings = {key: value.spec if key == "out_shardings" else value for key, value in options.items()}
    key = None if store is None else store.program_key(name, (function, shardings), mesh, (arguments, {}), {})
    if store is None or key is None or not isinstance(mesh, Mesh):
        compiled: Callable[..., Any] = jax.jit(function, **options).lower(*arguments).compile()
        return compiled
    if (stored := store.load_program(key, mesh)) is not None:
        return stored
    with watch_cache(lambda: None) as lookup:
        made = jax.jit(function, **options).lower(*arguments).compile()
    store.save_program(key, made, lookup.key, mesh, name=name, device=mesh.devices.flat[0].platform)
    return made
