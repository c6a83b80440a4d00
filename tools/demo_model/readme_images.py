"""The README's images: eight prompts, five frames of each, with their words above them; by both demo models.

python -m tools.demo_model.readme_images docs/images

Writes demo.png, demo-image.png, and first-frame.png, from which all of the second begin.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from comfy_tpu.pipeline.video import VideoPipeline
from tools.demo_model.captions import Attributes
from tools.demo_model.clips import draw, make_clips
from tools.demo_model.sheet import SHOWN_FRAMES

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
THING = Attributes("orange", "star", "still", "black")
MOTIONS = (
    "moving left",
    "moving right",
    "moving up",
    "moving down",
    "growing",
    "shrinking",
    "spinning",
    "standing still",
)
CELL, GAP, CAPTION, MARGIN = 96, 2, 18, 4


def main(folder: str) -> None:
    directory = Path(folder)
    pipeline = VideoPipeline.open("demo")
    strips = ((prompt, pipeline.generate(prompt, pipeline.settings(seed=7))) for prompt in PROMPTS)
    _write(directory / "demo.png", strips)

    clip = draw(make_clips([THING], torch.Generator().manual_seed(1), centred=1.0))[0]
    first = Image.fromarray((clip[:, 0] * 255).round().byte().permute(1, 2, 0).numpy())
    first.save(directory / "first-frame.png")
    pipeline = VideoPipeline.open("demo-image")
    prompts = [f"an {THING.colour} {THING.shape} {motion}" for motion in MOTIONS]
    strips = ((prompt, pipeline.generate(prompt, pipeline.settings(seed=7), [first])) for prompt in prompts)
    _write(directory / "demo-image.png", strips)


def _write(path: Path, strips: Iterable[tuple[str, Iterable[torch.Tensor]]]) -> None:
    """Two strips a row, each under its prompt."""
    strip = len(SHOWN_FRAMES) * (CELL + GAP) + 3 * MARGIN
    row = CELL + CAPTION + 2 * MARGIN
    sheet = Image.new("RGB", (2 * strip, len(PROMPTS) // 2 * row), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (prompt, parts) in enumerate(strips):
        frames = torch.cat(list(parts), dim=1)[0]
        left, top = number % 2 * strip + MARGIN, number // 2 * row + MARGIN
        pen.text((left, top), prompt, fill="black")
        for place, frame in enumerate(SHOWN_FRAMES):
            cell = Image.fromarray(frames[frame].mul(255).round().byte().numpy()).resize((CELL, CELL))
            sheet.paste(cell, (left + place * (CELL + GAP), top + CAPTION - GAP))
    sheet.save(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
