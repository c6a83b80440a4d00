"""Fits the colours of the demo's previews to its own videos, for its preview.json.

python -m tools.demo_model.preview_colours
"""

from __future__ import annotations

import json
import logging
import sys

import torch

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from comfy_tpu.pipeline.preview_colours import PREVIEW_FILE, ColourFit, PreviewColours, preview_features
from comfy_tpu.pipeline.video import VideoPipeline
from tools.demo_model.captions import BACKGROUNDS, COLOURS, MOTION_WORDS, MOTIONS, SHAPES

SCALE, STEPS = 8, 8
SEEDS = (0, 101)
logger = logging.getLogger("tools.demo_model")


def fit_colours(pipeline: VideoPipeline) -> tuple[PreviewColours, tuple[float, float]]:
    """The colours of first and of later latent frames, and their root mean square errors."""
    made = [
        _make_video(pipeline, f"a {colour} {{}} {{}} on a {background} background", number + place, seed)
        for seed in SEEDS
        for number, colour in enumerate(COLOURS)
        for place, background in enumerate(BACKGROUNDS)
    ]
    latents, colours = (torch.stack(values) for values in zip(*made, strict=True))
    first, first_error = _fit(latents[:, :1], colours[:, :1])
    later, later_error = _fit(latents[:, 1:], colours[:, 1:])
    return PreviewColours(first, later), (first_error, later_error)


def _make_video(pipeline: VideoPipeline, prompt: str, number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [frames, height, width, channels] of a video, and the mean colours [frames, height, width, 3] of the
    pixels that each stands for."""
    number += seed
    settings = pipeline.settings(seed=number, num_inference_steps=STEPS)
    prompt = prompt.format(SHAPES[number % len(SHAPES)], MOTION_WORDS[MOTIONS[number % len(MOTIONS)]][0])
    latents = pipeline.denoise(pipeline.encode_text(prompt, settings), settings)
    pixels = torch.cat(list(pipeline.decode(latents, settings)), dim=1)[0].permute(0, 3, 1, 2)
    small = torch.nn.functional.avg_pool2d(pixels, SCALE).permute(0, 2, 3, 1)
    later = small[1:].unflatten(0, (latents.shape[2] - 1, -1)).mean(dim=1)
    return latents[0].permute(1, 2, 3, 0), torch.cat([small[:1], later])


def _fit(latents: torch.Tensor, colours: torch.Tensor) -> tuple[torch.Tensor, float]:
    fit, features = ColourFit(), preview_features(latents)
    fit.add(features, colours)
    found = fit.solve()
    return found, float(((features @ found).clamp(0, 1) - colours).square().mean().sqrt())


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    pipeline = VideoPipeline.open("demo")
    colours, errors = fit_colours(pipeline)
    text = json.dumps(colours.as_dict(pipeline.files.latent_channels), separators=(",", ":"))
    (DEMO_DIRECTORY / PREVIEW_FILE).write_text(text + "\n", encoding="utf-8")
    logger.info("fitted to within %.3f of a range of 1 (first frames), %.3f (later ones)", *errors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
