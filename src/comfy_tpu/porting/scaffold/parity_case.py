"""The test configuration of a new family: a small pipeline, and the settings it is compared with diffusers' at."""

from __future__ import annotations

import inspect
from typing import Any

from comfy_tpu.porting.scaffold.facts import Facts
from comfy_tpu.porting.scaffold.small import TOKENS, class_names
from comfy_tpu.porting.scaffold.templating import MARK, render_module


def parity_case(facts: Facts) -> str:
    parameters = inspect.signature(facts.source.pipeline.__call__).parameters
    return render_module(
        "parity_case.py",
        title=facts.title,
        mark=MARK,
        pipeline=facts.source.name,
        classes=class_names(facts.source),
        configs={name: dict(config) for name, config in facts.configs.items() if config},
        settings=parity_settings(facts),
        layout=facts.learned.layout.name,
        pipeline_options={name: False for name in ("clean_caption", "use_resolution_binning") if name in parameters},
    )


def parity_settings(facts: Facts) -> dict[str, Any]:
    """The smallest sizes that no axis of a mesh divides."""
    learned = facts.learned
    settings: dict[str, Any] = {"height": 3 * facts.size_multiple, "width": 5 * facts.size_multiple}
    if not learned.makes_images:
        frames = 2 * learned.temporal_scale + 1
        settings["num_frames"] = frames if (frames - 1) % learned.frames_multiple == 0 else learned.frames_multiple + 1
    settings |= {"num_inference_steps": 3, "guidance_scale": 4.0}
    if "max_sequence_length" in inspect.signature(facts.source.pipeline.__call__).parameters:
        settings["max_sequence_length"] = TOKENS
    return settings
