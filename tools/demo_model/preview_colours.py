"""Fits the colours of the demo's previews to its own videos, for its preview.json.

python -m tools.demo_model.preview_colours
"""

from __future__ import annotations

import json
import logging
import sys

import torch

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from comfy_tpu.pipeline.preview_colours import PREVIEW_FILE, PreviewColours, preview_features
from comfy_tpu.pipeline.video import VideoPipeline
from tools.demo_model.captions import BACKGROUNDS, COLOURS, SHAPES

SCALE, STEPS = 8, 8
RIDGE = 1.0
"""Against factors that fit one video's pixels only."""
logger = logging.getLogger("tools.demo_model")


def fit_colours(pipeline: VideoPipeline) -> tuple[PreviewColours, float]:
    """The colours of the first frame's latents, which a preview shows, and their root mean square error."""
    latents, colours = [], []
    for number, colour in enumerate(COLOURS):
        for place, background in enumerate(BACKGROUNDS):
            shape = SHAPES[(number + place) % len(SHAPES)]
            settings = pipeline.settings(seed=number, num_inference_steps=STEPS)
            prompt = f"a {colour} {shape} moving left on a {background} background"
            made = pipeline.denoise(pipeline.encode_text(prompt, settings), settings)
            frame = next(iter(pipeline.decode(made, settings)))[0, 0]
            latents.append(made[0, :, 0].permute(1, 2, 0).reshape(-1, made.shape[1]))
            small = torch.nn.functional.avg_pool2d(frame.permute(2, 0, 1), SCALE)
            colours.append(small.permute(1, 2, 0).reshape(-1, 3))
    rows, target = preview_features(torch.cat(latents)).double(), torch.cat(colours).double()
    found = torch.linalg.solve(rows.T @ rows + RIDGE * torch.eye(rows.shape[1]), rows.T @ target)
    return PreviewColours(found.float()), float((rows @ found - target).square().mean().sqrt())


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    pipeline = VideoPipeline.open("demo")
    colours, error = fit_colours(pipeline)
    text = json.dumps(colours.as_dict(pipeline.files.latent_channels))
    (DEMO_DIRECTORY / PREVIEW_FILE).write_text(text + "\n", encoding="utf-8")
    logger.info("fitted to within %.3f of a range of 1", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
