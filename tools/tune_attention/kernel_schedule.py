"""The static schedule of the splash kernel by libtpu, with no TPU: `measure` one tile for one chip.

One bundle is one cycle unless the hardware waits for memory. Nothing runs on a TPU, and such waits are not seen.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_tpu.config import AttentionConfig, BlockSizes
from comfy_tpu.planning.schedule_files import ProgramSchedule, Region, list_programs, make_dump_flags, read_schedules
from comfy_tpu.planning.worker import make_environment

TOPOLOGIES = {
    "v5e": ("v5litepod-8", "v5e:2x4"),
    "v5p": ("v5p-8", "v5p:2x2x1"),
    "v6e": ("v6e-8", "v6e:2x4"),
    "v7x": ("tpu7x-8", "tpu7x:2x2x1"),
}
"""The accelerator type and the topology by which libtpu knows each chip."""

_LENGTH = 65_536
_HEADS = 4
_LEAST_REGION = 100


def report(region: Region) -> dict[str, Any]:
    """Bundles, the unit that bounds them, and how full each unit is in percent. Fills and spills are shares of the
    slots that load and store."""
    bound, needed = region.bound
    percent = {unit: round(100 * share) for unit, share in region.shares.items()}
    return {"bundles": region.bundles, "bound": bound, "bound_bundles": needed, "percent": percent}


def find_leaves(regions: Sequence[Region]) -> list[Region]:
    """The regions that hold no other of them."""
    return [
        region
        for region in regions
        if not any(
            other is not region and region.first <= other.first and other.last <= region.last for other in regions
        )
    ]


def describe_kernel(regions: Sequence[Region]) -> dict[str, Any]:
    """The parts of the splash kernel: both forms of a tile, the start and the end of a block of queries, and what
    every step of the grid costs besides.

    Raises ValueError where the regions are not those of the kernel.
    """
    large = [region for region in regions if region.bundles >= _LEAST_REGION]
    leaves = find_leaves(large)
    leaves.sort(key=lambda region: region.used["MATMUL"], reverse=True)
    if len(leaves) < 4 or not leaves[2].used["MATMUL"]:
        raise ValueError(f"expected two forms, a start and an end, got {len(leaves)} regions")
    # The exact form finds maxima and scales sums anew: more vector instructions.
    bounded, exact = sorted(leaves[:2], key=lambda region: region.used["VALU"])
    start = leaves[2]
    finish = max((leaf for leaf in leaves[3:] if leaf.first > bounded.last), key=lambda leaf: leaf.used["XLU"])
    body = min(
        (region for region in large if region.first <= start.first and region.last >= finish.last),
        key=lambda region: region.bundles,
    )
    parts = start.bundles + bounded.bundles + exact.bundles + finish.bundles
    return {
        "bounded": report(bounded),
        "exact": report(exact),
        "start_bundles": start.bundles,
        "finish_bundles": finish.bundles,
        "step_bundles": body.bundles - parts,
    }


def measure(chip: str, head_dim: int, tile: BlockSizes, dtype: str = "bfloat16") -> dict[str, Any]:
    """Compiles the kernel in a process of its own, and reads its schedule. "error" holds what the compiler refused."""
    found = compile_elsewhere(
        "tools.tune_attention.kernel_schedule", chip, [head_dim, dataclasses.astuple(tile), dtype]
    )
    if isinstance(found, str):
        return {"error": found}
    compiled, schedule = found
    return compiled | describe_kernel(schedule.regions)


def compile_elsewhere(module: str, chip: str, request: list[Any]) -> tuple[dict[str, Any], ProgramSchedule] | str:
    """Runs `python -m module [chip, *request]`, which is to print what `compile_kernel` returns.

    Returns that and the kernel's schedule, or what the compiler refused.
    """
    accelerator, _ = TOPOLOGIES[chip]
    with tempfile.TemporaryDirectory() as directory:
        flags = make_dump_flags(Path(directory))
        environment = {
            **os.environ,
            **make_environment({"mode": "compile", "accelerator": accelerator}),
            "LIBTPU_INIT_ARGS": " ".join(flags),
        }
        command = [sys.executable, "-m", module, json.dumps([chip, *request]), *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return _last_line(done.stderr)
        compiled: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        (kernel,) = [name for name in list_programs(Path(directory)) if name.startswith("comfy_tpu_splash")]
        return compiled, read_schedules(Path(directory), [kernel])[kernel]


def read_vmem(kernel: str) -> int:
    """Bytes of VMEM that a compiled kernel takes for itself.

    The compiler counts them from address 0, with what XLA keeps in front of the kernel's own memory: on v5e 64 MiB, the
    queries of the next run, which are fetched while the kernel works.
    """
    config = r'"{}":\[{{"memory_space":"1","offset":"(\d+)","size":"(\d+)"'
    given, used = (
        re.search(config.format(name), kernel) for name in ("scoped_memory_configs", "used_scoped_memory_configs")
    )
    return int(used[1]) + int(used[2]) - int(given[1]) if given and used else 0


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line or "exceeded" in line), lines[-1])[:300]


def compile_kernel(
    chip: str, call: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> dict[str, Any]:
    """Compiles a call with one splash kernel for arrays of these shapes."""
    import importlib.metadata

    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip][1]).devices[0]
    arrays = {
        name: jax.ShapeDtypeStruct(
            shape, jnp.int32 if len(shape) == 1 else jnp.dtype(dtype), sharding=SingleDeviceSharding(device)
        )
        for name, shape in shapes.items()
    }
    compiled = jax.jit(call).trace(**arrays).lower(lowering_platforms=("tpu",)).compile()
    (kernel,) = [line for line in compiled.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return {
        "vmem_bytes": read_vmem(kernel),
        "libtpu": importlib.metadata.version("libtpu"),
        "jax": jax.__version__,
    }


def _compile(chip: str, head_dim: int, tile: list[int], dtype: str) -> dict[str, Any]:
    from comfy_tpu.kernels.masking import Masking
    from comfy_tpu.kernels.splash import splash_attention

    blocks = BlockSizes(*tile)
    queries, keys = ((1, _HEADS, -(-_LENGTH // side) * side, head_dim) for side in (blocks.query, blocks.key))
    call = functools.partial(
        splash_attention,
        masking=Masking(),
        scale=head_dim**-0.5,
        chip=chip,
        blocks=blocks,
        interpret=False,
        partial=False,
        smooth_keys=AttentionConfig().smooth_keys,
    )
    return compile_kernel(chip, call, {"query": queries, "key": keys, "value": keys}, dtype)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_compile(*json.loads(sys.argv[1]))) + "\n")
