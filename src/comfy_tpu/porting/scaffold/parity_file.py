"""The tests of a new family: a small pipeline, and a comparison with diffusers' own."""

from __future__ import annotations

import inspect
from typing import Any

from comfy_tpu.porting.scaffold.checkout import MARK
from comfy_tpu.porting.scaffold.facts import Facts
from comfy_tpu.porting.scaffold.small import TOKENS, class_names


def small_file(facts: Facts) -> str:
    configs = {name: dict(config) for name, config in facts.configs.items() if config}
    return f'''"""A small random {facts.title} pipeline. {MARK}."""

from __future__ import annotations

import functools
from typing import Any

from comfy_tpu.porting.scaffold.small import build_pipeline

CLASSES = {class_names(facts.source)!r}
CONFIGS: dict[str, dict[str, Any]] = {configs!r}


@functools.cache
def reference() -> Any:
    return build_pipeline("{facts.source.name}", CLASSES, CONFIGS)
'''


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
    own = {name: False for name in ("clean_caption", "use_resolution_binning") if name in parameters}
    layout = facts.learned.layout.there
    imports = "from comfy_tpu.families.patches import as_tokens\n" if "as_tokens" in layout else ""
    return f'''"""{facts.title} against diffusers' own pipeline, on one device and over meshes.

{MARK}.
"""

import functools
from typing import Any

import pytest
import torch

from comfy_tpu.families.{facts.name} import {facts.constant}
{imports}from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import ported
from tests.families.pieces import component
from tests.families.ported import SAME, made, opened, psnr
from tests.families.small_{facts.name} import reference

CHOSEN: dict[str, Any] = {chosen_settings(facts)!r}

OWN: dict[str, Any] = {own!r}
"""What only diffusers' pipeline is told."""
CHANGES = ({{"prompt": "a blue circle"}}, {{"guidance_scale": 2.0}}, {{"negative_prompt": "red"}}, {{"seed": 8}})


def pipeline(mesh: str = "single") -> VideoPipeline:
    return opened(reference, mesh)


@functools.cache
def expected() -> torch.Tensor:
    return ported.expected(reference(), pipeline(), CHOSEN, lambda latents: {layout}, **OWN)


@pytest.mark.parametrize("mesh", ["single", "dp=2,tp=4", "dp=2,sp=4"])
def test_the_{facts.noun}_is_that_of_diffusers_on_every_mesh(mesh: str) -> None:
    assert expected().std() > 0.05, "the reference shows something"
    assert psnr(made(pipeline(mesh), CHOSEN), expected()) >= SAME


def test_prompt_guidance_and_seed_count() -> None:
    first = made(pipeline(), CHOSEN)
    for changed in CHANGES:
        assert psnr(made(pipeline(), CHOSEN, **changed), first) < SAME - 20, changed


def test_the_model_directory_is_of_this_family() -> None:
    assert pipeline().family is {facts.constant}
    component(pipeline(), {facts.constant}.transformer, "sp=2,tp=4")  # every weight has its one rule there, too
'''
