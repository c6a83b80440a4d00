"""fp8 of every family: the layers that have it, and how far the velocity of a step is from float32's."""

import copy
import fnmatch
import re
from typing import Any

import pytest
import torch

from comfy_tpu.bridge import build_skeleton
from comfy_tpu.config import Quantization, RuntimeConfig
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.registry import load_families
from comfy_tpu.pipeline.video import VideoPipeline
from tests.tracing import relative_error
from tools.aten_operators.usage import SMALL, SmallFamily

ONE_ROW = {"norm1.linear", "norm1_context.linear", "norm.linear", "img_mod.1", "txt_mod.1"}
"""Modulations: a product of one row for each video."""
ONCE = {"attn2.to_k", "attn2.to_v", "attn2.add_k_proj", "attn2.add_v_proj"}
"""Keys and values of the prompt and of images, which are computed once for all steps."""
TEXT_TOKENS = {
    *(f"attn.add_{name}_proj" for name in "qkv"),
    *("attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2"),
}
"""HunyuanVideo-1.5 has 2,000 tokens of text and images beside 48,000 of a video (480p, 121 frames)."""
_PARTS = ("to_q", "to_k", "to_v", "to_out.0")
SOUND = {
    *(f"{name}.{part}" for name in ("audio_attn1", "audio_attn2") for part in _PARTS),
    *(f"{name}.{part}" for name in ("audio_to_video_attn", "video_to_audio_attn") for part in _PARTS),
    *("audio_ff.net.0.proj", "audio_ff.net.2"),
}
"""LTX-2 has 126 tokens of sound beside 6,144 of a video, and half as many features in what joins the two."""
GATES = {
    f"{name}.to_gate_logits"
    for name in ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
}
"""One number for each head. Keys and values of LTX-2.3's prompts are computed in each step, of 1,024 tokens."""
LEFT_IN_FULL = {
    "HunyuanVideo-1.5": ONE_ROW | TEXT_TOKENS,
    "HunyuanVideo-1.5 image-to-video": ONE_ROW | TEXT_TOKENS,
    "LTX-2": ONCE | SOUND,
    "LTX-2.3": ONCE | SOUND | GATES,
}


def one_of_each_transformer() -> list[Any]:
    """Others of the same transformer are slow: their configs change the sizes of its layers, not their names."""
    seen: list[Any] = []
    made = []
    for family in load_families():
        is_new = not any(family.transformer is each for each in seen)
        seen.append(family.transformer)
        made.append(pytest.param(family, id=family.name, marks=[] if is_new else [pytest.mark.slow]))
    return made


@pytest.mark.default_cases(
    "Wan 2.1",
    "Wan 2.1 image-to-video",
    "Wan 2.1 first and last frame",
    "Wan 2.1 VACE",
    "Flux.1 dev",
    "Flux.2 dev",
    "HunyuanVideo-1.5",
    "LTX-Video",
    "Z-Image Turbo",
    "Qwen-Image",
)
@pytest.mark.parametrize("family", one_of_each_transformer())
def test_large_products_are_in_8_bits(family: ModelFamily) -> None:
    spec, config = family.transformer, next(iter(family.card.published.values()))
    module = build_skeleton(lambda: spec.build(copy.deepcopy(dict(config))))
    linears = [name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
    small = {name for name in linears if any(fnmatch.fnmatchcase(name, pattern) for pattern in spec.quantized)}
    assert all(any(fnmatch.fnmatchcase(name, pattern) for name in small) for pattern in spec.quantized)
    in_blocks = [re.sub(r"^\w*blocks\.\d+\.", "", name) for name in linears if re.match(r"\w*blocks\.\d+\.", name)]
    full = {name for name in in_blocks if not any(each.endswith(f".{name}") for each in small)}
    assert full <= LEFT_IN_FULL.get(family.name, ONE_ROW | ONCE)


FOUND = {
    "Wan 2.1": 0.0189,
    "Wan 2.2": 0.0160,
    "Flux.1": 0.0064,
    "Flux.2": 0.0023,
    "HunyuanVideo-1.5": 0.0180,
    "LTX-Video": 0.0416,
    "LTX-2": 0.0098,
    "Z-Image": 0.1295,  # 0.0547 without guidance, which multiplies it
    "Qwen-Image": 0.0138,
}
"""The relative error of the first velocity, after guidance, of small random models."""


@pytest.mark.parametrize(
    "family", [each if each == "Wan 2.1" else pytest.param(each, marks=pytest.mark.slow) for each in SMALL]
)
def test_a_step_in_fp8_is_near_float32(family: str) -> None:
    exact, small = (first_velocity(SMALL[family][0], kind) for kind in ("none", "fp8"))
    assert 0.5 * FOUND[family] < relative_error(small, exact) < 1.5 * FOUND[family]


def first_velocity(small: SmallFamily, quantize: Quantization) -> torch.Tensor:
    path = small.directory() if small.variant is None else small.directory(small.variant)
    pipeline = VideoPipeline.open(path, RuntimeConfig(mesh="single", quantize=quantize))
    settings = pipeline.settings(**{"negative_prompt": " ", **small.changes})
    return next(pipeline.velocities(pipeline.encode("a red circle moving left", settings), settings))
