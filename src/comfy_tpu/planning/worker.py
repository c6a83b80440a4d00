"""A process of its own that compiles one program: `python -m comfy_tpu.planning.worker REQUEST.json`.

Of its own, because the number of virtual devices and libtpu's environment are fixed when jax starts, and because
libtpu ends the process where it meets something it does not like.

"partition" lets XLA's partitioner split the program over virtual CPU devices, as it would over chips: it runs before
anything that depends on the machine. What it made is taken from a dump, because the CPU's own passes then turn bfloat16
into float32. "compile" asks the TPU compiler, through a description of the slice.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.planning.schedule_files import make_dump_flags


def make_environment(request: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables of the worker, to be set before jax is imported."""
    # A program from the cache is not partitioned again, so nothing would be dumped.
    common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if request["mode"] == "compile":
        flags = make_dump_flags(Path(request["schedule"])) if request.get("schedule") else ()
        return {
            **common,
            # Of this process alone: whoever set some keeps them.
            "LIBTPU_INIT_ARGS": " ".join((*filter(None, (os.environ.get("LIBTPU_INIT_ARGS"),)), *flags)),
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # chips that are here are not touched: whoever uses them need not wait
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": request["accelerator"],
            "TPU_WORKER_HOSTNAMES": "localhost",
            "XLA_FLAGS": "",
        }
    flags = (
        f"--xla_force_host_platform_device_count={request['devices']}",
        "--xla_backend_optimization_level=0",
        f"--xla_dump_to={request['directory']}",
        "--xla_dump_hlo_pass_re=spmd-partitioning",
        "--xla_dump_emitter_re=none",
    )
    return {**common, "XLA_FLAGS": " ".join(flags)}


def main(request_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    directory = Path(request["directory"])
    lowered = _lower(request)
    begin = time.perf_counter()
    report: dict[str, Any] = {}
    if request["mode"] == "compile":
        from comfy_tpu.config import MeshSizes
        from comfy_tpu.parallel.compiler_options import choose_compiler_options, compile_lowered

        options = choose_compiler_options("tpu", request["chip"], MeshSizes(**request["sizes"]))
        compiled: Any = compile_lowered(lowered, options)
        memory = compiled.memory_analysis()
        report["memory"] = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
        report["cost"] = {name: value for name, value in compiled.cost_analysis().items() if "{" not in name}
        report["compiler"] = f"libtpu {importlib.metadata.version('libtpu')}"
        text = compiled.as_text()
    else:
        _register_dummy_kernels()
        lowered.compile()
        # A single device is nothing to partition for.
        kind = "after_spmd-partitioning.*" if request["devices"] > 1 else "before_optimizations"
        (dump,) = directory.glob(f"*.{kind}.txt")
        text = dump.read_text(encoding="utf-8")
    (directory / "program.hlo").write_text(text, encoding="utf-8")
    report["seconds"] = time.perf_counter() - begin
    (directory / "report.json").write_text(json.dumps(report), encoding="utf-8")


def _lower(request: Mapping[str, Any]) -> Any:
    import jax
    import jax.export
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from comfy_tpu.config import MESH_AXES, MeshSizes
    from comfy_tpu.parallel.mesh import arrange_devices

    sizes = MeshSizes(**request["sizes"])
    if request["mode"] == "compile":
        from jax.experimental import topologies

        bounds = {"chips_per_host_bounds": request["host_bounds"]} if request["host_bounds"] else {}
        topology = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"], **bounds)
        devices = arrange_devices(sizes, topology.devices)
    else:
        devices = np.array(jax.devices()).reshape(sizes.dp, sizes.sp, sizes.tp)
    exported = jax.export.deserialize(bytearray(Path(request["program"]).read_bytes()))
    mesh = Mesh(devices, MESH_AXES)
    shardings = exported.in_shardings_jax(mesh)
    kept = exported.module_kept_var_idx
    # A program that names no mesh has no shardings, and without one its arguments would be compiled for the CPU.
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(
            exported.in_avals[index].shape, exported.in_avals[index].dtype, sharding=shardings[index] or whole
        )
        for index in kept
    ]

    def run(*given: jax.Array) -> Any:
        # What the program does not read has no sharding in the file, and would count in full on every device.
        flat: list[Any] = [jnp.zeros(aval.shape, aval.dtype) for aval in exported.in_avals]
        for index, array in zip(kept, given, strict=True):
            flat[index] = array
        positional, named = jax.tree.unflatten(exported.in_tree, flat)
        return exported.call(*positional, **named)

    return jax.jit(run).trace(*arguments).lower(lowering_platforms=("tpu",))


def _register_dummy_kernels() -> None:
    """Registers an address for each TPU kernel, which the CPU's compiler requires. The kernel is never called."""
    import ctypes

    import jax.ffi

    never = ctypes.CFUNCTYPE(None)(lambda: None)
    jax.ffi.register_ffi_target("tpu_custom_call", jax.ffi.pycapsule(never), platform="cpu", api_version=0)


if __name__ == "__main__":
    os.environ.update(make_environment(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    main(sys.argv[1])
