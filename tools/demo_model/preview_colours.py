"""Fits the colours of the demo's previews: a linear map from latents to pixels, for its preview.json.

python -m tools.demo_model.preview_colours
"""

from __future__ import annotations

import json
import logging
import sys

import torch

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, PREVIEW_FILE
from comfy_tpu.pipeline.video import VideoPipeline
from tools.demo_model.captions import BACKGROUNDS, COLOURS, SHAPES

SCALE, STEPS = 8, 10
logger = logging.getLogger("tools.demo_model")


def fit_colours(pipeline: VideoPipeline) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Factors [channels, 3] and bias [3] for colours in -1..1, and the root mean square error of the fit."""
    latents, colours = [], []
    backgrounds = list(BACKGROUNDS)
    for number, colour in enumerate(COLOURS):
        shape = SHAPES[number % len(SHAPES)]
        for background in (backgrounds[number % len(backgrounds)], backgrounds[(number + 1) % len(backgrounds)]):
            prompt = f"a {colour} {shape} moving left on a {background} background"
            settings = pipeline.settings(seed=number, num_inference_steps=STEPS)
            made = pipeline.denoise(pipeline.encode_text(prompt, settings), settings)
            frames = torch.cat(list(pipeline.decode(made, settings)), dim=1)[0]
            latents.append(made[0].permute(1, 2, 3, 0).reshape(-1, made.shape[1]))
            colours.append(_average(frames, pipeline.family.card.temporal_scale).reshape(-1, 3) * 2 - 1)
    rows = torch.cat(latents).double()
    rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    target = torch.cat(colours).double()
    found = torch.linalg.lstsq(rows, target).solution
    error = (rows @ found - target).square().mean().sqrt()
    return found[:-1], found[-1], float(error)


def _average(frames: torch.Tensor, temporal_scale: int) -> torch.Tensor:
    """Frames [t, height, width, 3] at the size of their latents."""
    small = torch.nn.functional.avg_pool2d(frames.permute(0, 3, 1, 2), SCALE).permute(0, 2, 3, 1)
    later = small[1:].unflatten(0, (-1, temporal_scale)).mean(1)
    return torch.cat([small[:1], later])


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    factors, bias, error = fit_colours(VideoPipeline.open("demo"))
    document = {"rgb_factors": factors.round(decimals=4).tolist(), "rgb_bias": bias.round(decimals=4).tolist()}
    (DEMO_DIRECTORY / PREVIEW_FILE).write_text(json.dumps(document) + "\n", encoding="utf-8")
    logger.info("fitted to within %.3f of a range of 2", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
