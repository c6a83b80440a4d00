"""The tests of a new family: a small pipeline, and a comparison with diffusers' own."""

from __future__ import annotations

import inspect
from typing import Any

from comfy_tpu.porting.scaffold.checkout import MARK
from comfy_tpu.porting.scaffold.facts import Facts
from comfy_tpu.porting.scaffold.small import TOKENS, class_names
from comfy_tpu.porting.scaffold.template_files import render


def small_file(facts: Facts) -> str:
    return render(
        "small_pipeline.py",
        title=facts.title,
        mark=MARK,
        pipeline=facts.source.name,
        classes=class_names(facts.source),
        configs={name: dict(config) for name, config in facts.configs.items() if config},
    )


def chosen_settings(facts: Facts) -> dict[str, Any]:
    parameters = inspect.signature(facts.source.pipeline.__call__).parameters
    chosen: dict[str, Any] = {"height": 3 * facts.size_multiple, "width": 5 * facts.size_multiple}
    if not facts.picture:
        chosen["num_frames"] = 2 * facts.learned.temporal_scale + 1
        if (chosen["num_frames"] - 1) % facts.learned.frames_multiple:
            chosen["num_frames"] = facts.learned.frames_multiple + 1
    chosen |= {"num_inference_steps": 3, "guidance_scale": 4.0}
    if "max_sequence_length" in parameters:
        chosen["max_sequence_length"] = TOKENS
    return chosen


def parity_file(facts: Facts) -> str:
    parameters = inspect.signature(facts.source.pipeline.__call__).parameters
    return render(
        "parity_test.py",
        name=facts.name,
        title=facts.title,
        noun=facts.noun,
        constant=facts.constant,
        mark=MARK,
        chosen=chosen_settings(facts),
        own={name: False for name in ("clean_caption", "use_resolution_binning") if name in parameters},
        layout=facts.learned.layout.there,
    )
