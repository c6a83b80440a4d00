"""comfy-tpu lora: what a LoRA file holds, and how much of it has a place in a model. Nothing is loaded or downloaded.

The exit status is 1 if the model refuses the file. With --json, one object on stdout. Its keys stay; new ones may be
added:

    schema            1
    path, model, family
    style             diffusers, kohya or ComfyUI
    ranks, scales     all of them, rising; a scale is alpha over rank
    low_rank, differences, biases     how many of each the file has
    modules, matched_modules
    unmatched_keys    those of all layers as one; text_keys: the number of those of a text encoder
    misfits           weights that are not merged because the model has them in another shape
    noise             the transformer of two that its name says it is for: high, low or all
    preset            the preset it is recognised to be made for, or null; preset_settings; strength
    metadata          of the file
    problem           why the model refuses it, or null
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from comfy_tpu.cli.options import add_ignored_keys, path_parser
from comfy_tpu.cli.terminal import print_error, print_text
from comfy_tpu.errors import join_names

if TYPE_CHECKING:
    from comfy_tpu.pipeline.lora_report import LoraReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", metavar="FILE", type=path_parser("FILE"), help="a LoRA, a .safetensors file")
    parser.add_argument(
        "--model", default="demo", help="a directory, a hub id, demo or demo-image (demo); a known id need not be here"
    )
    add_ignored_keys(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.pipeline.lora_report import LoraTargets, report_lora

    report = report_lora(arguments.lora, LoraTargets.find(arguments.model, arguments.ignore_config_key))
    if arguments.json:
        print(json.dumps(report.as_document(), indent=2))
    else:
        print_text("\n".join(_lines(report)))
        if report.problem is not None:
            print_error(report.problem)
    return 0 if report.problem is None else 1


def _lines(report: LoraReport) -> list[str]:
    from comfy_tpu.families.presets import describe_settings
    from comfy_tpu.pipeline.lora_report import format_ranks

    kinds = {"products of factors": report.low_rank, "whole differences": report.differences, "biases": report.biases}
    scales = ", ".join(f"{scale:g}" for scale in report.scales[:4]) + (" …" if len(report.scales) > 4 else "")
    rows = {
        "file": str(report.path),
        "model": f"{report.model} ({report.family})",
        "keys": f"{report.style} names{format_ranks(report.ranks)}; alpha over rank {scales or '—'}",
        "holds": ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count),
        "fits": f"{report.matched_modules} of {report.modules} modules",
        "no place": ", ".join(report.unmatched_keys) or "nothing",
        "not merged": join_names(report.misfits),
        "text": f"{report.text_keys} keys of a text encoder, which are left out" if report.text_keys else "",
        "for": "" if report.noise == "all" else f"the transformer of {report.noise} noise, by its name",
        "preset": _preset_text(report, describe_settings(report.preset_settings)),
    }
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items() if text]


def _preset_text(report: LoraReport, settings: str) -> str:
    if report.preset is None:
        return "none recognised"
    strength = "" if report.strength == 1 else f", at strength {report.strength:g}"
    return f"{report.preset}: {settings}{strength}"
