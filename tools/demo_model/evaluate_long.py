"""Make long videos of the demo model by context windows, and score them as whole videos.

python -m tools.demo_model.evaluate_long src/comfy_tpu/assets/demo --report long.json --sheet long.png
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tools.demo_model.clips import evaluation_prompts
from tools.demo_model.evaluate import evaluate, options, tally
from tools.demo_model.sheet import SHOWN_FRAMES, write_sheet

FRAMES = 161
FIRST = 4  # changes from the first latent's frame to those of the next one, in no measure
SETTLED = 16  # changes after which things have taken their place, in short videos as well
CONTEXT = {
    "context": str,
    "context_frames": int,
    "context_overlap": int,
    "context_stride": int,
    "context_weights": str,
    "context_keyframes": float,
}


def generate_long(model: Path, prompts: list[str], guidance: float, seed: int, **settings: object) -> Iterator:
    """Videos [F, H, W, 3], each with noise of its own. Windows are the model's own unless ``settings`` has others."""
    from comfy_tpu.pipeline.video import VideoPipeline

    pipeline = VideoPipeline.open(model)
    for number, prompt in enumerate(prompts):
        chosen = pipeline.settings(guidance_scale=guidance, seed=seed + number, **settings)
        yield torch.cat(list(pipeline.generate(prompt, chosen)), dim=1).numpy()[0]


def find_seam(video: np.ndarray, begin: int = FIRST) -> float:
    """The largest change between two frames, in units of what is usual in this video at the same place of a latent.

    A decoder makes four frames of a latent, and its changes from one latent to the next are larger than those within.
    Where the usual change is less than a file of eight bits can hold, as in videos of things that are still, the unit
    is what it can hold. ``begin``: the first change that is looked at.
    """
    changes = np.sqrt(np.square(np.diff(video.astype(np.float64), axis=0)).mean(axis=(1, 2, 3)))
    usual = np.array([max(np.median(changes[FIRST + place :: 4]), 1 / 255) for place in range(4)])
    return float((changes / usual[np.arange(len(changes)) % 4])[begin:].max())


def main() -> None:
    parser = options(__doc__, prompts=50, held_out=50)
    parser.add_argument("--frames", type=int, default=FRAMES)
    for name, kind in CONTEXT.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="the model's own, unless given")
    arguments = parser.parse_args()
    prompts = evaluation_prompts(arguments.prompts, arguments.held_out, arguments.seed)
    texts, wanted = [text for text, _ in prompts], [attributes for _, attributes in prompts]
    settings = {name: getattr(arguments, name) for name in CONTEXT}
    settings |= {"num_frames": arguments.frames, "num_inference_steps": arguments.steps}

    def make(guidance: float) -> np.ndarray:
        return np.stack(list(generate_long(arguments.model, texts, guidance, arguments.seed, **settings)))

    def judge(videos: np.ndarray) -> dict:
        seams = [round(find_seam(video), 2) for video in videos]
        later = [round(find_seam(video, begin=SETTLED), 2) for video in videos]
        shown = np.linspace(0, videos.shape[1] - 1, len(SHOWN_FRAMES)).round().astype(int)
        if arguments.sheet:
            write_sheet(arguments.sheet.with_stem(arguments.sheet.stem + "-whole"), videos, frames=shown)
        found = {"seams": seams, "largest_seam": max(seams), "seams_over_2": sum(seam > 2 for seam in seams)}
        behind = {"largest_later_seam": max(later), "later_seams_over_2": sum(seam > 2 for seam in later)}
        return {**tally(videos, wanted), **found, **behind}

    evaluate(arguments, make, judge)


if __name__ == "__main__":
    main()
