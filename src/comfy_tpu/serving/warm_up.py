"""The first job of a server: a step with its first model, which shows that jobs can be carried out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.request import Request

WARM_UP = "warm-up"


def make_warm_up(
    name: str, card: ModelCard, defaults: GenerationSettings, common: Mapping[str, Any], inputs: Path
) -> Job:
    """`inputs`: where images and videos for it are put, if the model makes no step without."""
    values = {**common, "model": name, "prompt": WARM_UP, "num_inference_steps": 1}
    takes = card.image
    if takes is not None and takes.required:
        path = inputs / f"{WARM_UP}.png"
        Image.new("RGB", (defaults.width, defaults.height), "gray").save(path)
        values["image"] = [str(path)] * (2 if takes.last_image == "required" else 1)
    for video in card.videos:
        if video.required:
            path = inputs / f"{WARM_UP}-{video.name}.gif"
            frames = [Image.new("L", (64, 64), number % 2) for number in range(defaults.num_frames)]
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 / defaults.fps)
            values[video.name] = [str(path)]
    return Job(WARM_UP, Request(values), f"{WARM_UP}{'.png' if card.makes_images else '.mp4'}", 1)
