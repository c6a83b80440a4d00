"""Components of a pipeline that a test has opened, by themselves."""

from typing import Any

import torch

from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.config import ShardingConfig
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.video import VideoPipeline


def component(
    pipeline: VideoPipeline, spec: ComponentSpec, mesh: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Component, Any]:
    """And its weights."""
    found = Component(
        spec,
        pipeline.files.config(spec),
        make_placement(mesh),
        dtype=dtype,
        # Every weight is stored in pieces, however small: it is the gathering that is on trial.
        sharding=ShardingConfig(gather_min_bytes=0),
        **options,
    )
    return found, found.load(Checkpoint.open(pipeline.directory / spec.name))
