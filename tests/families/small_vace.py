"""Small random Wan VACE pipelines, by diffusers, their directories, and what is given to them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanVACEPipeline, WanVACETransformer3DModel
from PIL import Image

from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.video_files import Frames
from tests.families import wan_pipelines
from tests.parity import small_models
from tests.pipeline import small_pipeline

KINDS = ("2.1", "2.2")
_CONTROL = 4.0
"""A factor on the weights that the control goes through."""
CONFIG = {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 2 * 4 + 64}


def _transformer(seed: int) -> WanVACETransformer3DModel:
    config = {**small_models.transformer().config, **CONFIG}
    transformer = wan_pipelines._random(seed, lambda: WanVACETransformer3DModel(**config))
    with torch.no_grad():  # as it is, another reference changes the video less than two ways to round it do
        for name, weight in transformer.named_parameters():
            is_control = name.startswith(("vace_blocks", "vace_patch")) and weight.ndim > 1
            if is_control or name.endswith(("attn1.to_v.weight", "attn1.to_out.0.weight")):
                weight.mul_(_CONTROL)
    return transformer


@functools.cache
def reference(kind: str = "2.1") -> WanVACEPipeline:
    known = small_pipeline.reference()
    parts: dict[str, Any] = {
        name: getattr(known, name) for name in ("tokenizer", "text_encoder", "vae", "scheduler")
    } | {"transformer": _transformer(5)}
    if kind == "2.2":
        parts |= {"transformer_2": _transformer(6), "boundary_ratio": 0.8}
    pipeline = WanVACEPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def directory(kind: str = "2.1") -> Path:
    path = small_models.temporary_directory()
    reference(kind).save_pretrained(path)
    return path


def clip(seed: int = 0, frames: int = 9, size: tuple[int, int] = (150, 100)) -> np.ndarray:
    """Blurred noise, uint8 [frames, height, width, 3]."""
    drawn = np.random.default_rng(seed).integers(0, 255, (frames, 5, 7, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(each).resize(size, Image.Resampling.BICUBIC)) for each in drawn])


def mask(frames: int = 9, size: tuple[int, int] = (150, 100)) -> np.ndarray:
    """A moving box with soft edges, uint8 [frames, height, width]."""
    width, height = size
    boxes = np.zeros((frames, height, width), np.uint8)
    for number, box in enumerate(boxes):
        left = 20 + 5 * number
        box[height // 5 : height * 2 // 3, left : left + width // 3] = 255
        box[:, left + width // 3 : left + width // 3 + 4] = 140
    return boxes


def pictures(count: int) -> list[Image.Image]:
    """Of several odd sizes and shapes."""
    sizes = [(51, 77), (90, 43), (64, 64), (13, 200)]
    return [Image.fromarray(clip(seed + 10, 1, size)[0]) for seed, size in enumerate(sizes[:count])]


CASES: dict[str, dict[str, Any]] = {
    "prompt alone": {},
    "video": {"video": True},
    "video and mask": {"video": True, "mask": True},
    "references": {"references": 2},
    "everything": {"video": True, "mask": True, "references": 1, "strength": (0.6,)},
    "strengths of layers": {"video": True, "mask": True, "references": 3, "strength": (0.3, 0.9)},
}


def given(case: str, seed: int = 0, size: tuple[int, int] = (150, 100)) -> GivenMedia:
    """`size`: of the video and its mask, width and height."""
    facts = CASES[case]
    videos = {"video": Frames(clip(seed, size=size))} if facts.get("video") else {}
    if facts.get("mask"):
        videos["mask"] = Frames(np.repeat(mask(size=size)[..., None], 3, axis=3))
    references = tuple(pictures(facts.get("references", 0)))
    return GivenMedia(references=references, videos=videos, control_strength=facts.get("strength"))


def diffusers_inputs(case: str, size: tuple[int, int] = (150, 100)) -> dict[str, Any]:
    facts = CASES[case]
    inputs: dict[str, Any] = {}
    if facts.get("video"):
        inputs["video"] = [Image.fromarray(frame) for frame in clip(size=size)]
    if facts.get("mask"):
        inputs["mask"] = [Image.fromarray(frame) for frame in mask(size=size)]
    if facts.get("references"):
        inputs["reference_images"] = pictures(facts["references"])
    strengths = facts.get("strength", (1.0,))
    return inputs | {"conditioning_scale": list(strengths) if len(strengths) > 1 else strengths[0]}


def run(kind: str, height: int, width: int, chosen: dict[str, Any], **inputs: Any) -> torch.Tensor:
    """diffusers' video [1, frames, height, width, 3]. `chosen`: settings by our names."""
    own = {"guidance_scale_2": chosen["guidance_scale_2"]} if kind == "2.2" else {}
    pipeline = reference(kind)
    of_image = type(pipeline.video_processor).get_default_height_width
    # diffusers takes a frame that is an array for a batch of them.
    pipeline.video_processor.get_default_height_width = lambda frame, *args: (
        frame.shape[:2] if isinstance(frame, np.ndarray) else of_image(pipeline.video_processor, frame, *args)
    )
    return (
        pipeline(
            height=height,
            width=width,
            generator=torch.Generator().manual_seed(chosen["seed"]),
            output_type="pt",
            **{
                name: chosen[name]
                for name in (
                    *("prompt", "negative_prompt", "num_frames", "num_inference_steps", "guidance_scale"),
                    "max_sequence_length",
                )
            },
            **own,
            **inputs,
        )
        .frames.permute(0, 1, 3, 4, 2)
        .float()
    )
