"""What attention windows cost the demo model: how many of 100 prompts are still followed, on whatever device there is.

`python -m tools.demo_model.attention_windows` prints a table; docs/design.md has it. The model was trained with full
attention to all of its 5 × 4 × 4 tokens, so the preset `video`, whose tiles are larger than that, changes nothing here.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from comfy_tpu.config import AttentionConfig, RuntimeConfig
from comfy_tpu.kernels.windows import make_schedule, parse_window
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import psnr
from tools.demo_model.clips import evaluation_prompts
from tools.demo_model.score import observe

GRID = (5, 4, 4)
WINDOWS = ("full", "1x1x1:5x3x3", "1x1x1:3x4x4", "1x1x1:3x3x3", "1x2x2:3x1x1", "1x4x4:1x1x1")
NAMES = ("colour", "motion", "shape")


def generate(window: str, prompts: int) -> tuple[dict[str, int], list[torch.Tensor], float]:
    """Prompts of which each attribute is right, the videos, and seconds a video."""
    attention = AttentionConfig(window=parse_window(window))
    pipeline = VideoPipeline.open("demo", RuntimeConfig(mesh="single", dtype="float32", attention=attention))
    right, videos, begin = dict.fromkeys(NAMES, 0), [], 0.0
    for number, (prompt, wanted) in enumerate(evaluation_prompts(prompts, prompts // 4, 2025)):
        if number == 1:  # the first one compiles
            begin = time.perf_counter()
        settings = pipeline.settings(seed=2025 + number)
        videos.append(torch.cat([part.float().cpu() for part in pipeline.generate(prompt, settings)], dim=1)[0])
        agreed = observe(videos[-1].numpy()).agrees(wanted)
        right = {name: right[name] + agreed[name] for name in NAMES}
    return right, videos, (time.perf_counter() - begin) / max(prompts - 1, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.attention_windows", description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    arguments = parser.parse_args()
    lines = ["| window | keys | colour | motion | shape | dB from full | s a video |", "|---|---|---|---|---|---|---|"]
    full: list[torch.Tensor] = []
    for window in WINDOWS:
        right, videos, seconds = generate(window, arguments.prompts)
        full = full or videos
        distance = torch.tensor([psnr(video, other) for video, other in zip(videos, full, strict=True)]).median()
        parsed = parse_window(window)
        share = 1.0 if parsed is None else make_schedule(parsed, GRID).attended_share
        counts = " | ".join(str(right[name]) for name in NAMES)
        lines.append(f"| `{window}` | {share:.0%} | {counts} | {distance:.1f} | {seconds:.2f} |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
