"""Measures the cost of swapping two transformers when only one fits into memory: `python -m tools.pair_swap`.

The demo model with a random pair of middle size in place of its transformer. A step's time is the median of those of a
run; what the first step behind the boundary takes longer is the swap.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import ResidencyConfig, RuntimeConfig
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline

logger = logging.getLogger(__name__)

PROMPT = "a red circle moving left on a black background"


def write_pair(directory: Path, hidden: int, layers: int) -> int:
    """Writes a model with two random transformers; returns the bytes of one."""
    from diffusers import WanTransformer3DModel

    shutil.copytree(DEMO_DIRECTORY, directory)
    own = json.loads((directory / "transformer" / "config.json").read_text())
    config = {name: value for name, value in own.items() if not name.startswith("_")}
    config |= {"attention_head_dim": 128, "num_attention_heads": hidden // 128, "ffn_dim": 4 * hidden}
    for seed, name in enumerate(("transformer", "transformer_2")):
        torch.manual_seed(seed)
        shutil.rmtree(directory / name, ignore_errors=True)
        WanTransformer3DModel(**config | {"num_layers": layers}).save_pretrained(directory / name)
    index = json.loads((directory / "model_index.json").read_text())
    index |= {"boundary_ratio": 0.875, "transformer_2": index["transformer"]}
    (directory / "model_index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in (directory / "transformer").glob("*.safetensors"))


def run(pipeline: VideoPipeline, settings: Any) -> tuple[float, float]:
    """Seconds of a step, and of the swap."""
    embeddings = pipeline.encode(PROMPT, settings)
    at: list[float] = []

    def on_progress(progress: Progress) -> None:
        if progress.stage == "denoising":
            at.append(time.perf_counter())

    pipeline.on_progress = on_progress
    pipeline.denoise(embeddings, settings)
    taken = [after - before for before, after in itertools.pairwise(at)]
    steps = [step.transformer for step in pipeline.plan(settings)]
    first = steps.index(1)
    usual = statistics.median(taken[:first] + taken[first + 1 :])
    return usual, taken[first] - usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "model"
        nbytes = write_pair(directory, chosen.hidden, chosen.layers)
        logger.info("%.2f GB each", nbytes / 1e9)
        for name, budget in (("both have room", 4 * nbytes), ("one has room", int(1.1 * nbytes))):
            residency = Residency(ResidencyConfig(budget_bytes=budget))
            pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"), residency=residency)
            settings = pipeline.settings(
                height=chosen.size,
                width=chosen.size,
                num_frames=chosen.frames,
                num_inference_steps=chosen.steps,
                flow_shift=5.0,
            )
            run(pipeline, settings)  # compiles
            for _ in range(chosen.rounds):
                step, swap = run(pipeline, settings)
                logger.info("%s: a step %.2f s, the swap %.2f s = %.2f steps", name, step, swap, swap / step)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("comfy_tpu").setLevel(logging.WARNING)
    main()
