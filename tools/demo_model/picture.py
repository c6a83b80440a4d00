"""The README's picture: eight prompts, five frames of each, with their words above them.

python -m tools.demo_model.picture docs/images/demo.png
"""

import sys

import torch
from PIL import Image, ImageDraw

from comfy_tpu.pipeline.video import VideoPipeline
from tools.demo_model.sheet import SHOWN

PROMPTS = (
    "a red circle moving right on a black background",
    "a blue square growing on a white background",
    "a yellow star spinning on a brown background",
    "a green triangle moving up on a gray background",
    "a pink circle shrinking on a black background",
    "a cyan star moving down on a black background",
    "an orange square moving left on a gray background",
    "a purple triangle standing still on a white background",
)
CELL, GAP, CAPTION, MARGIN = 96, 2, 18, 4


def main(path: str) -> None:
    pipeline = VideoPipeline.open("demo")
    strip = len(SHOWN) * (CELL + GAP) + 3 * MARGIN
    row = CELL + CAPTION + 2 * MARGIN
    picture = Image.new("RGB", (2 * strip, len(PROMPTS) // 2 * row), "white")
    draw = ImageDraw.Draw(picture)
    for number, prompt in enumerate(PROMPTS):
        frames = torch.cat(list(pipeline.generate(prompt, pipeline.settings(seed=7))), dim=1)[0]
        left, top = number % 2 * strip + MARGIN, number // 2 * row + MARGIN
        draw.text((left, top), prompt, fill="black")
        for place, frame in enumerate(SHOWN):
            cell = Image.fromarray(frames[frame].mul(255).round().byte().numpy()).resize((CELL, CELL))
            picture.paste(cell, (left + place * (CELL + GAP), top + CAPTION - GAP))
    picture.save(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
