"""Finds the operators that the families and the tests of operators use, by tracing, without running anything."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils._pytree import tree_leaves

from comfy_tpu.bridge import TraceContext, call_function, to_device
from comfy_tpu.bridge.catalogue import Row, find_row
from comfy_tpu.bridge.compat import replace_attribute
from comfy_tpu.bridge.environment import DeviceTensor, TraceEnvironment
from comfy_tpu.compiler.program import DeviceProgram
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.families.registry import BUILT_IN, family_cards
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.video import VideoPipeline
from tests.bridge import test_operators, test_views
from tests.families import (
    small_animate,
    small_flux,
    small_flux2,
    small_hunyuan,
    small_ltx,
    small_ltx2,
    small_qwen_image,
    small_vace,
    small_z_image,
    test_hunyuan_image,
    wan_pipelines,
)
from tests.pipeline import small_pipeline


@dataclasses.dataclass(frozen=True)
class SmallFamily:
    directory: Callable[..., Path]
    variant: str | None = None
    image_count: int = 0
    given: Callable[[], GivenMedia] | None = None
    """Instead of images."""
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_VIDEO = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 4.0}
_IMAGE = {"height": 48, "width": 80, "num_inference_steps": 2, "guidance_scale": 4.0, "max_sequence_length": 40}
_HUNYUAN = {**_VIDEO, "max_sequence_length": small_hunyuan.TEXT_TOKENS}
_LTX2 = {**_VIDEO, "max_sequence_length": small_ltx2.TEXT_TOKENS}
_ANIMATE = {**_VIDEO, "context_frames": 5, "context_overlap": 1}


def _control() -> GivenMedia:
    return small_vace.given("everything")


def _motion() -> GivenMedia:
    return small_animate.given(9, replace=True)


SMALL: dict[str, tuple[SmallFamily, ...]] = {
    "Wan 2.1": (
        SmallFamily(small_pipeline.directory, changes=_VIDEO),
        SmallFamily(wan_pipelines.directory, "2.1 image", 1, changes=_VIDEO),
        SmallFamily(wan_pipelines.directory, "2.1 first and last", 2, changes=_VIDEO),
        SmallFamily(small_vace.directory, "2.1", given=_control, changes=_VIDEO),
    ),
    "Wan 2.2": (
        SmallFamily(wan_pipelines.directory, "2.2", changes=_VIDEO),
        SmallFamily(wan_pipelines.directory, "2.2 image", 2, changes=_VIDEO),
        SmallFamily(wan_pipelines.directory, "5B", changes=_VIDEO),
        SmallFamily(wan_pipelines.directory, "5B image", 1, changes=_VIDEO),
        SmallFamily(small_vace.directory, "2.2", given=_control, changes=_VIDEO),
        SmallFamily(small_animate.directory, given=_motion, changes=_ANIMATE),
    ),
    "Flux.1": (
        SmallFamily(small_flux.directory, "dev", changes=_IMAGE),
        SmallFamily(small_flux.directory, "schnell", changes=_IMAGE),
    ),
    "Flux.2": (
        SmallFamily(small_flux2.directory, "dev", changes=_IMAGE),
        SmallFamily(small_flux2.directory, "klein", changes=_IMAGE),
        SmallFamily(small_flux2.directory, "base", changes=_IMAGE),
    ),
    "HunyuanVideo-1.5": (
        SmallFamily(small_hunyuan.directory, changes=_HUNYUAN),
        SmallFamily(test_hunyuan_image.directory, None, 1, changes=_HUNYUAN),
    ),
    "LTX-Video": (
        SmallFamily(small_ltx.directory, changes=_VIDEO),
        SmallFamily(small_ltx.directory, None, 1, changes=_VIDEO),
    ),
    "LTX-2": (
        SmallFamily(small_ltx2.directory, changes=_LTX2),
        SmallFamily(functools.partial(small_ltx2.directory, later=True), changes=_LTX2),
    ),
    "Z-Image": (
        SmallFamily(small_z_image.directory, "turbo", changes=_IMAGE),
        SmallFamily(small_z_image.directory, "base", changes=_IMAGE),
    ),
    "Qwen-Image": (
        SmallFamily(small_qwen_image.directory, "image", changes=_IMAGE),
        SmallFamily(small_qwen_image.directory, "edit", 1, changes=_IMAGE),
        SmallFamily(small_qwen_image.directory, "plus", 2, changes=_IMAGE),
    ),
}
"""Small models by their column on the page."""


def find_used_by_families() -> dict[str, set[Row]]:
    check_small_models()
    return {column: find_used(column) for column in SMALL}


def find_used(column: str) -> set[Row]:
    """Operators that the small models of a column are traced to."""
    with _record_dispatches() as rows, replace_attribute(DeviceProgram, "__call__", _trace_call):
        for small in SMALL[column]:
            pipeline = _open(small)
            images = tuple(wan_pipelines.picture(seed) for seed in range(small.image_count))
            given = GivenMedia(images) if small.given is None else small.given()
            for _ in pipeline.generate("a red circle moving left", pipeline.settings(**small.changes), given):
                pass
    return rows


def check_small_models() -> None:
    """Raises LookupError if a family has no small model here. Families that `port new` wrote need none."""
    seen = {_open(small).family.name for families in SMALL.values() for small in families}
    ported = {path.stem for path in Path("tests/families/ported").glob("*.py")}
    ours = [card for card in family_cards() if card.package in BUILT_IN and card.name not in ported]
    missing = {model.name for card in ours for model in card.models} - seen
    if missing:
        raise LookupError(f"no small model is traced for {', '.join(sorted(missing))}; add one to SMALL in {__name__}")


def _open(small: SmallFamily) -> VideoPipeline:
    path = small.directory() if small.variant is None else small.directory(small.variant)
    return VideoPipeline.open(path, RuntimeConfig(mesh="single", platform="cpu"))


def find_compared() -> set[Row]:
    """Operators that tests/bridge compares with torch, alone or as views."""
    with _record_dispatches() as rows:
        for _, call, tensors in test_operators.CASES.values():
            _trace(call, *tensors)
        for case in test_views.CASES:
            _trace(case, torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    return rows


def _trace(call: Callable[..., Any], *tensors: torch.Tensor) -> None:
    jax.eval_shape(lambda *arrays: call_function(call, arrays, context=TraceContext()), *to_device(tensors))


def _trace_call(program: DeviceProgram, weights: Mapping[str, jax.Array], /, **inputs: Any) -> Any:
    """Replaces a program's call: traces it and returns zeros of the outputs' shapes, so that a pipeline runs
    through."""
    return jax.tree.map(lambda output: jnp.zeros(output.shape, output.dtype), program.shapes(weights, **inputs))


@contextlib.contextmanager
def _record_dispatches() -> Iterator[set[Row]]:
    rows: set[Row] = set()
    dispatch = TraceEnvironment.dispatch

    def record(self: TraceEnvironment, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = dispatch(self, func, types, args, kwargs)
        row = find_row(func)
        # What a model computes on the host while it is traced comes this way too, and stays torch's.
        if row and any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs, result))):
            rows.add(row)
        return result

    with replace_attribute(TraceEnvironment, "dispatch", record):
        yield rows
