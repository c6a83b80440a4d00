"""A small random Wan Animate pipeline, by diffusers, its directory, and what is given to it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanAnimatePipeline, WanAnimateTransformer3DModel
from PIL import Image

from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.video_files import Frames
from tests.families import wan_pipelines
from tests.families.small_vace import clip, mask
from tests.parity import small_models
from tests.pipeline import small_pipeline

SIDE = 16
CONFIG = {
    "num_layers": 4,
    "in_channels": 12,
    "latent_channels": 4,
    "image_dim": 32,
    "added_kv_proj_dim": 96,
    "motion_encoder_size": SIDE,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 8,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}


@functools.cache
def reference() -> WanAnimatePipeline:
    known = small_pipeline.reference()
    config = {**small_models.transformer().config, **CONFIG}
    pipeline = WanAnimatePipeline(
        tokenizer=known.tokenizer,
        text_encoder=known.text_encoder,
        vae=known.vae,
        scheduler=known.scheduler,
        image_encoder=wan_pipelines._image_encoder(),
        image_processor=wan_pipelines._processor(),
        transformer=wan_pipelines._random(8, lambda: WanAnimateTransformer3DModel(**config)),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def directory() -> Path:
    path = small_models.temporary_directory()
    reference().save_pretrained(path)
    return path


def person() -> Image.Image:
    return Image.fromarray(clip(20, 1, (51, 77))[0])


def videos(frames: int, replace: bool) -> dict[str, np.ndarray]:
    """uint8 by name, of several sizes."""
    made = {"pose_video": clip(21, frames, (70, 50)), "face_video": clip(22, frames, (30, 33))}
    if replace:
        made |= {"background_video": clip(23, frames), "mask": np.repeat(mask(frames)[..., None], 3, axis=3)}
    return made


def given(frames: int, replace: bool) -> GivenMedia:
    return GivenMedia((person(),), videos={name: Frames(each) for name, each in videos(frames, replace).items()})


def run(frames: int, replace: bool, size: tuple[int, int], chosen: dict[str, Any]) -> torch.Tensor:
    """diffusers' video [1, frames, height, width, 3]. Segment k has the noise of seed + k: its pipeline would draw it
    from one generator, which would make a segment depend on how many were made before."""
    generator = torch.Generator().manual_seed(chosen["seed"])
    done = 0

    def reseed(pipeline: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        nonlocal done
        done += 1
        generator.manual_seed(chosen["seed"] + done // chosen["num_inference_steps"])
        return given

    pictures = {name: [Image.fromarray(each) for each in made] for name, made in videos(frames, replace).items()}
    if replace:
        pictures["mask_video"] = [each.convert("L") for each in pictures.pop("mask")]
    return (
        reference()(
            image=person(),
            height=size[0],
            width=size[1],
            mode="replace" if replace else "animate",
            segment_frame_length=chosen["context_frames"],
            prev_segment_conditioning_frames=chosen["context_overlap"],
            generator=generator,
            callback_on_step_end=reseed,
            output_type="pt",
            **{
                name: chosen[name]
                for name in (
                    *("prompt", "negative_prompt", "num_inference_steps", "guidance_scale"),
                    "max_sequence_length",
                )
            },
            **pictures,
        )
        .frames.permute(0, 1, 3, 4, 2)
        .float()
    )
