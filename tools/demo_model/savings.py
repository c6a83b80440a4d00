"""What the ways to save time cost: every variant makes the same videos in one process, in turns, and is scored.

python -m tools.demo_model.savings --prompts 100 --steps 50 --report savings.json

Written after every prompt, so that a run that ends early leaves what it has; a table follows at the end. By variant:
the settings, forwards of the transformer, seconds of each video (from the prompt to frames on the host, after a
warm-up), their median, how many times faster than lossless (the median of the ratios within a prompt), the share of
right answers, and how far the latents are from the lossless ones (norm of the difference over norm, median). With the
date, the machine and the versions.
"""

import argparse
import datetime
import json
import logging
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comfy_tpu.bench.machine import describe_machine
from comfy_tpu.config import FAST, AttentionConfig, FastSettings, Quantization, RuntimeConfig
from comfy_tpu.kernels.windows import parse_window
from comfy_tpu.pipeline.video import VideoPipeline
from tools.demo_model.clips import evaluation_prompts
from tools.demo_model.evaluate import tally_observations
from tools.demo_model.score import Observation, observe

logger = logging.getLogger("tools.demo_model")


@dataclass(frozen=True)
class Variant:
    name: str
    settings: dict[str, float] = field(default_factory=dict)
    quantize: Quantization | None = "none"
    attention_window: str = "full"
    int8_scores: bool = False
    """At any length: the demo's sequences are shorter than those that 8 bits make faster."""
    fast: FastSettings | None = None

    @property
    def runtime(self) -> RuntimeConfig:
        attention = AttentionConfig(
            implementation="int8" if self.int8_scores else "auto",
            int8_min_tokens=1,
            window=parse_window(self.attention_window),
        )
        return RuntimeConfig(quantize=self.quantize, fast=self.fast, attention=attention)


LOSSLESS = Variant("lossless")
REUSE, GUIDANCE = {"reuse": FAST.reuse}, {"guidance_until": FAST.guidance_until}
SHARES = (0.8, 0.7, 0.6, 0.5)


def make_variants() -> tuple[Variant, ...]:
    """Each way to save time alone, and combined with the others."""
    reuse, guidance = f"reuse {FAST.reuse}", f"guidance until {FAST.guidance_until}"
    both = {f"{reuse}, guidance until {share}": {**REUSE, "guidance_until": share} for share in SHARES}
    return (
        LOSSLESS,
        Variant(reuse, REUSE),
        *(Variant(f"guidance until {share}", {"guidance_until": share}) for share in SHARES),
        Variant("fp8", quantize="fp8"),
        Variant("int8 scores", int8_scores=True),
        Variant(f"{reuse}, fp8", REUSE, "fp8"),
        Variant(f"{guidance}, fp8", GUIDANCE, "fp8"),
        *(Variant(name, settings) for name, settings in both.items()),
        *(Variant(f"{name}, fp8", settings, "fp8") for name, settings in both.items()),
        *(Variant(f"{name}, fp8, int8 scores", settings, "fp8", int8_scores=True) for name, settings in both.items()),
        Variant("fast", quantize=None, fast=FAST),  # as a user asks for it: without 8 bits on a CPU
    )


VARIANTS = make_variants()


@dataclass
class Account:
    settings: dict[str, Any]
    forwards: int
    seconds: list[float] = field(default_factory=list)
    faster: list[float] = field(default_factory=list)
    difference: list[float] = field(default_factory=list)
    seen: list[Observation] = field(default_factory=list)

    def report(self, wanted: list) -> dict:
        scores = tally_observations(self.seen, wanted)
        return {
            "settings": self.settings,
            "forwards": self.forwards,
            "median_s": statistics.median(self.seconds),
            "times_faster": statistics.median(self.faster),
            "share": scores["share"],
            "latent_difference": statistics.median(self.difference),
            "misses": scores["misses"],
            "seconds": [round(value, 3) for value in self.seconds],
        }


class Runner:
    """The pipelines of all variants on one model; those that differ in settings only share one."""

    def __init__(self, model: str, variants: list[Variant], steps: int, mesh: str = "auto") -> None:
        self._steps = steps
        self._pipelines = {
            runtime: VideoPipeline.open(model, replace(runtime, mesh=mesh))
            for runtime in {variant.runtime for variant in variants}
        }

    def settings(self, variant: Variant, seed: int) -> Any:
        pipeline = self._pipelines[variant.runtime]
        return pipeline.settings(num_inference_steps=self._steps, seed=seed, **variant.settings)

    def account(self, variant: Variant) -> Account:
        pipeline, settings = self._pipelines[variant.runtime], self.settings(variant, 0)
        lossy = {"reuse": settings.reuse, "guidance_until": settings.guidance_until}
        return Account({**lossy, "quantize": pipeline.running.quantize}, pipeline.plan(settings).forwards)

    def make(self, variant: Variant, prompt: str, seed: int) -> tuple[float, np.ndarray, torch.Tensor]:
        """Seconds, frames [F, H, W, 3], latents."""
        pipeline, settings = self._pipelines[variant.runtime], self.settings(variant, seed)
        began = time.perf_counter()
        latents = pipeline.denoise(pipeline.encode(prompt, settings), settings)
        frames = torch.cat(list(pipeline.decode(latents, settings)), dim=1)
        return time.perf_counter() - began, frames[0].numpy(), latents


def describe_run(settings: dict[str, Any]) -> dict[str, Any]:
    """What a reader of the file needs to compare its seconds with others: `date`, `hardware`, `versions`."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"schema": 1, "date": date, **describe_machine(), "settings": settings}


def make_table(variants: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of Markdown, the fastest variant last."""
    shown = ("colour", "motion", "shape")
    rows = [
        f"| {name} | {found['forwards']} | {found['median_s']:.2f} s | {found['times_faster']:.2f}× | "
        + " | ".join(f"{100 * found['share'].get(each, 0):.0f}" for each in shown)
        + f" | {100 * found['latent_difference']:.1f} % |"
        for name, found in sorted(variants.items(), key=lambda item: item[1]["times_faster"])
    ]
    head = f"| | forwards | a video | faster | {' | '.join(shown)} | latents differ by |"
    return [head, "|---|" + "---:|" * 7, *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--held-out", type=int, default=25, help="how many of them are triples training never saw")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=2025)
    parser.add_argument("--mesh", default="auto")
    names = [variant.name for variant in VARIANTS[1:]]
    parser.add_argument("--only", nargs="*", default=names, choices=names, metavar="NAME", help="; ".join(names))
    parser.add_argument("--windows", nargs="*", default=[], help="attention windows, each a further variant")
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    circumstances = describe_run({name: value for name, value in vars(arguments).items() if name != "report"})
    variants = [LOSSLESS, *(variant for variant in VARIANTS if variant.name in arguments.only)]
    variants += [Variant(f"window {window}", attention_window=window) for window in arguments.windows]
    runner = Runner(arguments.model, variants, arguments.steps, arguments.mesh)
    accounts = {variant.name: runner.account(variant) for variant in variants}
    prompts = evaluation_prompts(arguments.prompts, arguments.held_out, arguments.seed)
    # In an order in which a run that ends early has its share of both kinds.
    order = np.random.default_rng(0).permutation(len(prompts))
    for variant in variants:
        runner.make(variant, prompts[0][0], arguments.seed)
    wanted = []
    for number in order.tolist():
        text, attributes = prompts[number]
        wanted.append(attributes)
        made = {variant.name: runner.make(variant, text, arguments.seed + number) for variant in variants}
        base_seconds, _, base_latents = made[LOSSLESS.name]
        for name, (seconds, frames, latents) in made.items():
            account = accounts[name]
            account.seconds.append(seconds)
            account.faster.append(base_seconds / seconds)
            account.difference.append(float((latents - base_latents).norm() / base_latents.norm()))
            account.seen.append(observe(frames))
        variants_report = {name: account.report(wanted) for name, account in accounts.items()}
        document = {**circumstances, "prompts": len(wanted), "variants": variants_report}
        arguments.report.write_text(json.dumps(document, indent=1) + "\n")
        logger.info("%d: %s", len(wanted), {name: round(made[name][0], 1) for name in made})
    logger.info("the table:\n%s", "\n".join(make_table(variants_report)))


if __name__ == "__main__":
    main()
