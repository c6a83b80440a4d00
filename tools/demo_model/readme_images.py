"""The images of the README and of the page on long videos: prompts, and some frames of each, by both demo models.

python -m tools.demo_model.readme_images docs/images

Writes demo.png, demo-long.png, demo-image.png, and first-frame.png, from which all of the last begin.
"""

import sys
from collections.abc import Iterable, Sequence
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
LONG_PROMPTS = (
    "a cyan star moving left on a brown background",
    "a purple triangle moving right on a black background",
    "a green star shrinking on a black background",
    "a red square spinning on a white background",
)
LONG_FRAMES = range(0, 161, 20)
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
    long = pipeline.settings(seed=7, num_frames=LONG_FRAMES[-1] + 1, guidance_scale=2.0)
    strips = ((prompt, pipeline.generate(prompt, long)) for prompt in LONG_PROMPTS)
    _write(directory / "demo-long.png", strips, LONG_FRAMES, columns=1)

    clip = draw(make_clips([THING], torch.Generator().manual_seed(1), centred=1.0))[0]
    first = Image.fromarray((clip[:, 0] * 255).round().byte().permute(1, 2, 0).numpy())
    first.save(directory / "first-frame.png")
    pipeline = VideoPipeline.open("demo-image")
    prompts = [f"an {THING.colour} {THING.shape} {motion}" for motion in MOTIONS]
    strips = ((prompt, pipeline.generate(prompt, pipeline.settings(seed=7), [first])) for prompt in prompts)
    _write(directory / "demo-image.png", strips)


def _write(
    path: Path,
    strips: Iterable[tuple[str, Iterable[torch.Tensor]]],
    shown: Sequence[int] = SHOWN_FRAMES,
    columns: int = 2,
) -> None:
    """So many strips a row, each under its prompt."""
    drawn = [_draw_strip(prompt, torch.cat(list(parts), dim=1)[0], shown) for prompt, parts in strips]
    width, height = drawn[0].size
    sheet = Image.new("RGB", (columns * width, len(drawn) // columns * height), "white")
    for number, strip in enumerate(drawn):
        sheet.paste(strip, (number % columns * width, number // columns * height))
    sheet.save(path)


def _draw_strip(prompt: str, frames: torch.Tensor, shown: Sequence[int]) -> Image.Image:
    strip = Image.new("RGB", (len(shown) * (CELL + GAP) + 3 * MARGIN, CELL + CAPTION + 2 * MARGIN), "white")
    ImageDraw.Draw(strip).text((MARGIN, MARGIN), prompt, fill="black")
    for place, frame in enumerate(shown):
        cell = Image.fromarray(frames[frame].mul(255).round().byte().numpy()).resize((CELL, CELL))
        strip.paste(cell, (MARGIN + place * (CELL + GAP), MARGIN + CAPTION - GAP))
    return strip


if __name__ == "__main__":
    main(*sys.argv[1:])
