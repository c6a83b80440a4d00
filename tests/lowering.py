"""Programs at their full size, lowered for TPUs, and the work that lowering takes.

Lowering is bounded by its work (operators traced, operations lowered, peak memory), never by its time, which is the
machine's.
"""

import contextlib
import gc
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import torch

from comfy_tpu.bridge.compat import replace_attribute
from comfy_tpu.bridge.environment import TraceEnvironment
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.step import abstract_embeddings, export_step

OPERATIONS = 10_000
"""Of StableHLO in one program. HunyuanVideo's decoder has 8,500; twenty blocks that are not scanned have more."""
PEAK_BYTES = 4e9
BFLOAT16, FLOAT32, INT32 = np.dtype("bfloat16"), np.dtype("float32"), np.dtype("int32")


def array(*shape: int, dtype: np.dtype = FLOAT32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def component(spec: ComponentSpec, config: Mapping[str, Any], placement: Placement) -> Component:
    return Component(spec, config, placement, dtype=torch.bfloat16)


def outputs(exported: jax.export.Exported) -> Any:
    """As inputs of the next program."""
    avals = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return jax.tree.map(lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype), avals)


def lower_step(
    family: ModelFamily,
    config: Mapping[str, Any],
    settings: GenerationSettings,
    placement: Placement,
    channels: int,
    images: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> dict[str, jax.export.Exported]:
    """The product's own programs of a step. `images`: embeddings of images that are given."""
    embeddings = abstract_embeddings(family, config, settings) | dict(images or {})
    made = component(family.transformer, config, placement)
    exported = export_step(made, family, settings, embeddings, channels)
    return {"prepare": exported.prepare, "denoise_step": exported.compute}


def facts(exported: jax.export.Exported, *, sequence: int) -> dict[str, Any]:
    """`sequence`: how long a dimension is at least that counts tokens of the image or video."""
    text = exported.mlir_module()
    return {
        "platforms": list(exported.platforms),
        "devices": exported.nr_devices,
        "kernels": text.count("tpu_custom_call"),
        "loops": text.count("stablehlo.while"),
        "all to all": text.count("stablehlo.all_to_all"),
        "operations": text.count(" = "),
        "megabytes": len(exported.mlir_module_serialized) / 1e6,
        "outputs": [list(aval.shape) for aval in exported.out_avals],
        "sequences in one array": max(sum(size >= sequence for size in shape) for shape in _shapes(text)),
    }


def measure_lowering(lower: Callable[..., Mapping[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The facts of the programs that `lower` returns, and what lowering them took."""
    gc.collect()
    before = _reset_peak()
    with _counted_operators() as traced:
        programs = lower(*arguments)
    return {"programs": programs, "operators": len(traced), "peak": _peak_bytes() - before}


@contextlib.contextmanager
def _counted_operators() -> Iterator[list[str]]:
    """The name of every torch operator that is traced, as often as it is."""
    traced: list[str] = []
    dispatch = TraceEnvironment.dispatch

    def counting(self: TraceEnvironment, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        traced.append(str(func))
        return dispatch(self, func, types, args, kwargs)

    with replace_attribute(TraceEnvironment, "dispatch", counting):
        yield traced


def assert_bounded_work(seen: Mapping[str, Any], *, operators: int, operations: int = OPERATIONS) -> None:
    """`operators`: a quarter more than were traced when this was written. Blocks that are not scanned, or are traced
    anew for every frame, are over it; how long the machine took is not asked."""
    assert seen["operators"] <= operators
    for name, program in seen["programs"].items():
        assert program["operations"] <= operations, name
    assert seen["peak"] < PEAK_BYTES


def _shapes(text: str) -> list[list[int]]:
    found = set(re.findall(r"tensor<((?:\d+x)+)\w+>", text))
    return [[int(size) for size in shape.split("x")[:-1]] for shape in found]


def _reset_peak() -> int:
    """Starts counting the peak anew; returns the bytes held now. Without /proc: the peak so far."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
