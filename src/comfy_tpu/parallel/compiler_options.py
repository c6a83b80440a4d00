"""XLA's options for one compilation, by the devices that it is for."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

import jax

from comfy_tpu.config import MeshSizes

logger = logging.getLogger(__name__)

Options = Mapping[str, str | bool]

# Large products are cuBLAS's in any case, and XLA takes long to find that out. Wan 14B at 480p on an H200 compiles in
# 5.2 s instead of 7.8 s and runs in 2.53 s instead of 2.55 s; in fp8, in 5.6 s instead of minutes.
_GPU: Options = {"xla_gpu_enable_triton_gemm": False}

# An exchange of queries runs beside the products that make keys, and so on.
_ASYNC_EXCHANGES: Options = {"xla_tpu_enable_async_all_to_all": True}
# Gathers run on the chip's SparseCores, beside what its TensorCore computes.
_SPARSE_CORE_GATHERS: Options = {"xla_tpu_enable_sparse_core_collective_offload_all_gather": True}
# With calls of SparseCores that are loaded ahead, jaxlib 0.10.2 cannot print a compiled program of libtpu 0.0.51:
# "async-update instruction should have 1 operands but sees 2". `plan` and program dumps read that text.
_PRINTABLE: Options = {"xla_tpu_sparse_core_maximum_preloaded_async_calls": "0"}

# Wan 14B at 720p on v6e-8, by the schedules of libtpu 0.0.51: dp2×sp4 waits 0.033 s a step for collectives, not 0.262.
# v5e has no SparseCores, and its compiler puts gathers beside products of its own accord. The compiler for v5p leaves
# gathers on the TensorCore, whatever it is told. The one for v7x offloads them anyway.
_OVERLAP: Mapping[str, Options] = {
    "v5e": _ASYNC_EXCHANGES,
    "v5p": _ASYNC_EXCHANGES,
    "v6e": {**_SPARSE_CORE_GATHERS, **_PRINTABLE, **_ASYNC_EXCHANGES},
    "v7x": _ASYNC_EXCHANGES,
}
"""By TPU generation: what lets the compiler put the collectives of sequence parallelism beside other work."""
_ANY_MESH: Mapping[str, Options] = {"v7x": _PRINTABLE}
"""By TPU generation; the compiler for v7x uses SparseCores on one device, too, for changes of layout."""

_UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w+)'")


def choose_compiler_options(platform: str, chip: str = "", sizes: MeshSizes | None = None) -> dict[str, str | bool]:
    """The options for a program on such devices; without sizes, for one that is not partitioned.

    Flags in LIBTPU_INIT_ARGS keep the values that they have there.
    """
    if platform == "gpu":
        return dict(_GPU)
    if platform != "tpu":
        return {}
    given = re.findall(r"--(?:no)?(xla_\w+)", os.environ.get("LIBTPU_INIT_ARGS", ""))  # --noxla_… switches one off
    wanted = dict(_ANY_MESH.get(chip, {}))
    if sizes is not None and sizes.sp > 1:
        wanted |= _OVERLAP.get(chip, {})
    return {name: value for name, value in wanted.items() if name not in given}


def compile_lowered(lowered: jax.stages.Lowered, options: Options) -> jax.stages.Compiled:
    """Compiles with `options`, without those that the installed compiler does not know."""
    kept = dict(options)
    while True:
        try:
            return lowered.compile(compiler_options=kept or None)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN_OPTION.search(str(error))
            if unknown is None or unknown[1] not in kept:
                raise
            del kept[unknown[1]]
            logger.info("the compiler does not know %s; compiling without it", unknown[1])
