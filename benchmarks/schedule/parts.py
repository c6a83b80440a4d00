"""Estimates of what comes before and after the steps, Wan's text encoder and VAE, by the TPU compiler's schedules.

    python -m benchmarks.schedule.parts benchmarks/schedule/results/parts

One JSON file each: nothing runs on a TPU. Needs libtpu (x86_64), minutes each; with --no-compile only the operations
and transfers of XLA's partitioned program are counted. The programs are those of a pipeline: both prompts of a guided
request in one batch, and a latent frame behind the first, which all but one of a video are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import torch

from benchmarks.schedule.steps import summarize_schedule
from comfy_tpu.cli.schedule_report import schedule_document
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import MeshSizes
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.registry import load_family
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.parallel.chips import Slice, parse_slice
from comfy_tpu.parallel.mesh import abstract_placement
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.parallel.traffic import Traffic, sent_bytes, transfer_seconds
from comfy_tpu.pipeline.vae_backend import split_columns, vae_functions
from comfy_tpu.planning.compilation import compile_exported, partition_exported
from comfy_tpu.planning.hlo import Module
from comfy_tpu.planning.program import cpu_only, serialize

TOKENS = 512
GUIDED = MeshSizes(dp=2, sp=4)
"""What `auto` chooses for a guided request on v6e-8; encoders and the VAE are on the same mesh."""


@dataclasses.dataclass(frozen=True)
class Part:
    tpu: str
    sizes: MeshSizes
    export: Callable[[Placement, ModelFamily], jax.export.Exported]


def export_text_encoder(placement: Placement, family: ModelFamily) -> jax.export.Exported:
    (encoder,) = family.text.encoders
    config = part_configs("comfy_tpu.families.wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers")[encoder.component.name]
    component = Component(encoder.component, config, placement, dtype=torch.bfloat16)
    tokens = jax.ShapeDtypeStruct((2, TOKENS), jnp.int32)
    program = component.program(encoder.encode)
    return program.export("tpu", component.abstract_weights(), input_ids=tokens, attention_mask=tokens)


def export_decoder(height: int, width: int) -> Callable[[Placement, ModelFamily], jax.export.Exported]:
    def export(placement: Placement, family: ModelFamily) -> jax.export.Exported:
        component = Component(family.vae.component, vae_config(), placement, dtype=torch.bfloat16)
        functions = vae_functions("torchax", family)
        latent = jax.ShapeDtypeStruct((1, 16, 1, height // 8, width // 8), jnp.float32)
        axes = split_columns(functions.decode_axes, latent.shape[-1], placement)
        program = component.program(functions.decode_frame, input_axes=axes, donate=("cache",))
        weights = component.abstract_weights()
        _, cache = program.shapes(weights, latent=latent, cache=None)
        return program.export("tpu", weights, latent=latent, cache=cache)

    return export


def vae_config() -> dict[str, Any]:
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        config = AutoencoderKLWan().config  # its defaults are Wan 2.1's
    return {name: value for name, value in config.items() if not name.startswith("_")}


PARTS = {
    "umt5-v6e-1": Part("v6e-1", MeshSizes(), export_text_encoder),
    "umt5-v6e-8": Part("v6e-8", GUIDED, export_text_encoder),
    "umt5-v6e-8-tp": Part("v6e-8", MeshSizes(dp=2, tp=4), export_text_encoder),
    "wan-vae-480p-v6e-1": Part("v6e-1", MeshSizes(), export_decoder(480, 832)),
    "wan-vae-480p-v6e-8": Part("v6e-8", GUIDED, export_decoder(480, 832)),
    "wan-vae-720p-v6e-8": Part("v6e-8", GUIDED, export_decoder(720, 1280)),
}


def count(module: Module, slice_: Slice, sizes: MeshSizes) -> dict[str, Any]:
    """Operations and transfers of one device, by XLA's partitioner; seconds by the traffic model, all in a row."""
    transfers: dict[str, dict[str, float]] = {}
    for found in module.collectives():
        axes, group = found.axes(sizes), len(found.group)
        traffic = Traffic("", found.kind, axes, group, 1, sent_bytes(found.kind, group, found.nbytes))
        total = transfers.setdefault(
            f"{found.kind} over {'×'.join(axes)}", {"times": 0, "sent_bytes": 0, "seconds": 0.0}
        )
        total["times"] += found.times
        total["sent_bytes"] += found.times * traffic.nbytes
        total["seconds"] += found.times * transfer_seconds(traffic, slice_, sizes)
    operations = {
        "products": module.product_flops(),
        "convolutions": module.convolution_flops(),
        "kernels": module.kernel_flops(),
    }
    return {"operations": operations, "transfers": transfers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--no-compile", action="store_true", help="count the partitioned programs only")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        part = PARTS[name]
        slice_ = parse_slice(part.tpu)
        with cpu_only():
            placement = abstract_placement(part.sizes, platform="tpu", chip=slice_.chip.name)
            exported = part.export(placement, load_family("Wan 2.1"))
        program = bytes(serialize(exported))
        result = {
            "tpu": part.tpu,
            "mesh": dataclasses.asdict(part.sizes),
            "counted": count(partition_exported(program, slice_, part.sizes), slice_, part.sizes),
        }
        if not arguments.no_compile:
            step, report = compile_exported(program, slice_, part.sizes)
            result |= summarize_schedule(schedule_document(step))
            result |= {"compile_seconds": report["seconds"], "allocated_bytes": report["memory"]}
        text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
        (arguments.directory / f"{name}.json").write_text(text, encoding="utf-8")
        print(name, result.get("seconds", "counted"), flush=True)


if __name__ == "__main__":
    main()
