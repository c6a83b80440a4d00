"""First frames and prompts → videos that go on from them: is the frame kept, is the motion followed?

python -m tools.demo_model.evaluate_image src/comfy_tpu/assets/demo/image_to_video --report scores.json

Every first frame shows a thing of middling size in the middle, so that what it will do stands in the prompt alone.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from tools.demo_model.captions import Attributes
from tools.demo_model.clips import FRAMES, SIZE, draw, evaluation_prompts, make_clips
from tools.demo_model.evaluate import compare_frames, evaluate, options, tally
from tools.demo_model.model import load_image_model

PSNR_MIN = 25.0
"""Decibels between an image and the first frame of its video."""


@dataclass(frozen=True)
class Task:
    prompt: str
    image: Image.Image
    wanted: Attributes


def tasks(count: int, held_out: int, seed: int) -> list[Task]:
    prompts = evaluation_prompts(count, held_out, seed)
    batch = make_clips([wanted for _, wanted in prompts], torch.Generator().manual_seed(seed), centred=1.0)
    frames = (draw(batch)[:, :, 0] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [
        Task(prompt, Image.fromarray(frame), batch.attributes(row))
        for row, ((prompt, _), frame) in enumerate(zip(prompts, frames, strict=True))
    ]


def first_frame_psnr(image: Image.Image, video: np.ndarray) -> float:
    """PSNR of a video's first frame [H, W, 3] in 0..1 against the image it was given."""
    difference = np.asarray(video[0], np.float64) - np.asarray(image, np.float64) / 255
    return -10 * math.log10(max(float(np.square(difference).mean()), 1e-12))


class _ImagePerPrompt(Tensor):
    """CLIP's tokens that stay one row a prompt where diffusers repeats those of its one image."""

    def repeat(self, *sizes: int) -> Tensor:
        return self.as_subclass(Tensor)


class ImageBatchPipeline(WanImageToVideoPipeline):
    """diffusers' pipeline, which has one image for all prompts, with one each: a tensor [N, 3, H, W] in 0..1."""

    def encode_image(self, image: Tensor, device: torch.device | None = None) -> Tensor:
        return super().encode_image((255 * image).round(), device).as_subclass(_ImagePerPrompt)

    def prepare_latents(self, image: Tensor, batch_size: int, *shape_and_place: Any) -> tuple[Tensor, Tensor]:
        *between, generators, latents, last_image = shape_and_place
        parts = [
            super(ImageBatchPipeline, self).prepare_latents(one[None], 1, *between, generator, latents, last_image)
            for one, generator in zip(image, generators, strict=True)
        ]
        noise, condition = zip(*parts, strict=True)
        return torch.cat(noise), torch.cat(condition)


def generate(
    pipeline: WanImageToVideoPipeline, given: list[Task], steps: int, guidance: float, seed: int, batch: int = 50
) -> np.ndarray:
    """Videos [N, F, H, W, 3]; each task has its own noise, whatever the batch."""
    pipeline = ImageBatchPipeline(**pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    videos = []
    for start in range(0, len(given), batch):
        part = given[start : start + batch]
        images = torch.stack([torch.from_numpy(np.array(task.image)) for task in part])
        output = pipeline(
            images.permute(0, 3, 1, 2) / 255,
            [task.prompt for task in part],
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=[torch.Generator().manual_seed(seed + start + number) for number in range(len(part))],
        )
        videos.append(np.asarray(output.frames))
    return np.concatenate(videos)


def generate_compiled(model: Path, given: list[Task], steps: int, guidance: float, seed: int) -> np.ndarray:
    from comfy_tpu.pipeline.video import VideoPipeline

    pipeline = VideoPipeline.open(model)
    videos = []
    for number, task in enumerate(given):
        settings = pipeline.settings(num_inference_steps=steps, guidance_scale=guidance, seed=seed + number)
        videos.append(torch.cat(list(pipeline.generate(task.prompt, settings, images=[task.image])), dim=1)[0].numpy())
    return np.stack(videos)


def judge(videos: np.ndarray, given: list[Task]) -> dict:
    report = tally(videos, [task.wanted for task in given])
    decibels = [first_frame_psnr(task.image, video) for task, video in zip(given, videos, strict=True)]
    report["first_frame"] = {
        "mean_db": round(sum(decibels) / len(decibels), 2),
        "worst_db": round(min(decibels), 2),
        "share_kept": round(sum(value >= PSNR_MIN for value in decibels) / len(decibels), 4),
    }
    report["frames"] = compare_frames(videos, [task.wanted for task in given])
    return report


def main() -> None:
    arguments = options(__doc__, prompts=200, held_out=200).parse_args()
    given = tasks(arguments.prompts, arguments.held_out, arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    pipeline = None if arguments.compiled else load_image_model(arguments.model, arguments.device, dtype)

    def make(guidance: float) -> np.ndarray:
        if arguments.compiled:
            return generate_compiled(arguments.model, given, arguments.steps, guidance, arguments.seed)
        return generate(pipeline, given, arguments.steps, guidance, arguments.seed, arguments.batch)

    evaluate(arguments, make, lambda videos: judge(videos, given))


if __name__ == "__main__":
    main()
