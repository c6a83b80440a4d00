"""Programs at their full size, lowered for TPUs in a process of their own; and what such a process tells."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import torch

from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.denoise import make_step
from comfy_tpu.pipeline.schedule import HISTORY

BFLOAT16, FLOAT32, INT32 = np.dtype("bfloat16"), np.dtype("float32"), np.dtype("int32")


def array(*shape: int, dtype: np.dtype = FLOAT32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def component(spec: ComponentSpec, config: Mapping[str, Any], placement: Placement) -> Component:
    return Component(spec, config, placement, dtype=torch.bfloat16)


def outputs(exported: jax.export.Exported) -> Any:
    """As inputs of the next program."""
    avals = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return jax.tree.map(lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype), avals)


def export_step(
    made: Component,
    predict: Callable[..., torch.Tensor],
    weights: Mapping[str, Any],
    latent: tuple[int, ...],
    prepared: Mapping[str, Any],
    *,
    guided: bool,
) -> jax.export.Exported:
    program = made.program(make_step(predict), static=("guided",), input_axes={"prepared": ("dp",)}, output_axes=())
    return program.export(
        "tpu",
        weights,
        samples=[array(*latent)] * HISTORY,
        outputs=[array(*latent)] * HISTORY,
        coefficients=array(2 * HISTORY),
        timestep=array(1),
        guidance_scale=array(),
        prepared=dict(prepared),
        guided=guided,
    )


def facts(exported: jax.export.Exported, *, sequence: int) -> dict[str, Any]:
    """`sequence`: how long a dimension is at least that counts tokens of the picture or video."""
    text = exported.mlir_module()
    return {
        "platforms": list(exported.platforms),
        "devices": exported.nr_devices,
        "kernels": text.count("tpu_custom_call"),
        "loops": text.count("stablehlo.while"),
        "all to all": text.count("stablehlo.all_to_all"),
        "megabytes": len(exported.mlir_module_serialized) / 1e6,
        "outputs": [list(aval.shape) for aval in exported.out_avals],
        "sequences in one array": max(sum(size >= sequence for size in shape) for shape in _shapes(text)),
    }


def tell(report: Mapping[str, Any]) -> None:
    """The last thing such a process does."""
    sys.stdout.write(json.dumps({**report, "peak": _peak_bytes()}) + "\n")


def lowered(module: str, *arguments: str) -> Any:
    """What the process of this module tells."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": "src"},
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _shapes(text: str) -> list[list[int]]:
    found = set(re.findall(r"tensor<((?:\d+x)+)\w+>", text))
    return [[int(size) for size in shape.split("x")[:-1]] for shape in found]


def _peak_bytes() -> int:
    """Of this program alone: getrusage also counts what the test's worker held when it started this one."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
