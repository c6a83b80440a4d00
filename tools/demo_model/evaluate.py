"""Generate prompts of the grammar with diffusers' WanPipeline, or with ours, and score what comes out.

python -m tools.demo_model.evaluate src/comfy_tpu/assets/demo --report scores.json --sheet scores.png
python -m tools.demo_model.evaluate src/comfy_tpu/assets/demo --preset 4step
"""

import argparse
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tools.demo_model.captions import Attributes
from tools.demo_model.clips import FRAMES, SIZE, evaluation_prompts
from tools.demo_model.model import load
from tools.demo_model.score import Observation, edge_width, observe
from tools.demo_model.sheet import write_sheet

logger = logging.getLogger("tools.demo_model")


def generate(pipeline, prompts: list[str], steps: int, guidance: float, seed: int, batch: int) -> np.ndarray:
    """Videos [N, F, H, W, 3]; each prompt has its own noise, whatever the batch."""
    pipeline.set_progress_bar_config(disable=True)
    videos = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        # Drawn on the CPU: the same noise on every kind of device.
        noise = [torch.Generator().manual_seed(seed + start + number) for number in range(len(part))]
        output = pipeline(
            part,
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=noise,
        )
        videos.append(np.asarray(output.frames))
    return np.concatenate(videos)


def generate_compiled(
    model: Path, prompts: list[str], steps: int, guidance: float, seed: int, preset: str | None = None
) -> np.ndarray:
    """The same videos by the project's own pipeline, on the devices that JAX finds. A preset goes before steps and
    guidance."""
    from comfy_tpu.pipeline.video import VideoPipeline

    pipeline = VideoPipeline.open(model, preset=preset)
    chosen = {"num_inference_steps": steps, "guidance_scale": guidance, **pipeline.preset.settings}
    videos = []
    for number, prompt in enumerate(prompts):
        settings = pipeline.settings(**chosen, seed=seed + number)
        videos.append(torch.cat(list(pipeline.generate(prompt, settings)), dim=1).numpy())
    return np.concatenate(videos)


def tally(videos: np.ndarray, wanted: list[Attributes]) -> dict:
    """Share of right answers for each attribute, and every miss."""
    return tally_observations([observe(video) for video in videos], wanted)


def tally_observations(observations: list[Observation], wanted: list[Attributes]) -> dict:
    right, asked, misses = Counter(), Counter(), []
    for number, (seen, attributes) in enumerate(zip(observations, wanted, strict=True)):
        for name, correct in seen.agrees(attributes).items():
            asked[name] += 1
            right[name] += correct
            if not correct:
                misses.append(f"{number}: {name} of {attributes} seen as {getattr(seen, name)}")
    return {"share": {name: round(right[name] / asked[name], 4) for name in asked}, "misses": misses}


def compare_frames(videos: np.ndarray, wanted: list[Attributes]) -> dict:
    """Every frame scored as if it were an image: the first ones, and all the others, which show the same thing.

    By attribute the share of frames that show the wanted one, `all` of them at once, and the mean width of edges.
    """
    frames = videos[:, :, None]  # [N, F, 1, H, W, 3]
    kinds = {"first": slice(0, 1), "others": slice(1, None)}
    return {
        name: _score_images([(frame, want) for row, want in zip(frames[:, kind], wanted, strict=True) for frame in row])
        for name, kind in kinds.items()
    }


def _score_images(images: list[tuple[np.ndarray, Attributes]]) -> dict[str, float]:
    right, asked = Counter(), Counter()
    widths = []
    for image, attributes in images:
        agreed = observe(image).agrees(replace(attributes, motion=None))
        agreed["all"] = all(agreed.values())
        right.update(agreed)
        asked.update(agreed.keys())
        widths.append(edge_width(image[0]))
    shares = {name: round(right[name] / asked[name], 4) for name in asked}
    return {**shares, "edge_px": round(float(np.nanmean(widths)), 3)}


def options(description: str | None, *, prompts: int, held_out: int) -> argparse.ArgumentParser:
    """The command line options of every evaluation."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--held-out", type=int, default=held_out, help="how many are triples training never saw")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0])
    parser.add_argument("--seed", type=int, default=2025)
    parser.add_argument("--batch", type=int, default=50, help="videos made at a time; each has its own noise")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compiled", action="store_true", help="through comfy-tpu instead of diffusers")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--sheet", type=Path)
    return parser


def evaluate(
    arguments: argparse.Namespace, make: Callable[[float], np.ndarray], judge: Callable[[np.ndarray], dict]
) -> None:
    """Makes videos at every given guidance with `make`, scores them with `judge`, and writes the results."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    reports = {}
    for guidance in arguments.guidance:
        videos = make(guidance)
        report = reports[str(guidance)] = judge(videos)
        logger.info("guidance %s: %s", guidance, {name: found for name, found in report.items() if name != "misses"})
        for miss in report["misses"]:
            logger.info("  %s", miss)
    if arguments.report:
        settings = {name: str(value) for name, value in vars(arguments).items() if name not in ("report", "sheet")}
        arguments.report.write_text(json.dumps({"settings": settings, "guidance": reports}, indent=2) + "\n")
    if arguments.sheet:
        write_sheet(arguments.sheet, videos)


def main() -> None:
    parser = options(__doc__, prompts=200, held_out=200)
    parser.add_argument("--preset", help="through comfy-tpu, with the settings and the LoRA of this preset")
    arguments = parser.parse_args()
    prompts = evaluation_prompts(arguments.prompts, arguments.held_out, arguments.seed)
    texts, wanted = [text for text, _ in prompts], [attributes for _, attributes in prompts]
    is_ours = arguments.compiled or arguments.preset is not None
    pipeline = None if is_ours else load(arguments.model, arguments.device, getattr(torch, arguments.dtype))
    seen_in_training = arguments.prompts - arguments.held_out

    def make(guidance: float) -> np.ndarray:
        if is_ours:
            return generate_compiled(
                arguments.model, texts, arguments.steps, guidance, arguments.seed, arguments.preset
            )
        return generate(pipeline, texts, arguments.steps, guidance, arguments.seed, arguments.batch)

    def judge(videos: np.ndarray) -> dict:
        held_out = tally(videos[seen_in_training:], wanted[seen_in_training:])["share"]
        return {**tally(videos, wanted), "held_out": held_out, "frames": compare_frames(videos, wanted)}

    evaluate(arguments, make, judge)


if __name__ == "__main__":
    main()
