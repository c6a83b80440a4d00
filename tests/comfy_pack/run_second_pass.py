"""A second pass by nodes, over the stand-in for ComfyUI, with a small random model of videos with sound and one of
images.

    python tests/comfy_pack/run_second_pass.py

prints one JSON object: how far what two samplers make is from a second pass of the command line, and how wrong latents
are refused.
"""

import contextlib
import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import fake_comfyui  # beside this file
import torch

from comfy_tpu.config import RunOptions, RuntimeConfig, SecondPass
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.families.flux.card import CARD as FLUX
from comfy_tpu.families.ltx2.card import CARD as LTX2
from comfy_tpu.pipeline.second_pass import denoise_again
from comfy_tpu.pipeline.video import VideoPipeline
from tests.comfy_pack.neutral_options import NEUTRAL
from tests.families import small_flux, small_ltx2

PROMPT = "a red circle"
COMMON = {"num_inference_steps": 4, "guidance_scale": 1.0, "seed": 1}
MODELS = {
    "video": (LTX2, small_ltx2.directory, {"num_frames": 9, "fps": 24, "height": 64, "width": 64}),
    "image": (FLUX, lambda: small_flux.directory("dev"), {"height": 32, "width": 48}),
}


def run(kind: str) -> dict[str, Any]:
    from comfy_tpu.comfy import family_nodes  # which imports ComfyUI
    from comfy_tpu.comfy.options_node import make_options

    card, directory, size = MODELS[kind]
    (directory() / "generation.json").write_text(json.dumps({"max_sequence_length": small_ltx2.TEXT_TOKENS}))
    pipeline = VideoPipeline.open(directory(), RuntimeConfig(mesh="single"))
    family_nodes.pipeline_run = lambda *given, **options: contextlib.nullcontext(pipeline)
    nodes = {node.KIND: node for node in family_nodes.make_nodes(card.node_sets[0])}
    model = {"model_id": "small"}
    sampling = COMMON | size | model
    embeds = nodes["TextEncoder"].execute(prompt=PROMPT, **model).result
    sampling |= dict(zip(("prompt_embeds", "negative_prompt_embeds"), embeds, strict=False))
    larger = {**sampling, "height": 2 * size["height"], "width": 2 * size["width"]}

    def sample(**given: Any) -> torch.Tensor:
        return nodes["TPUSampler"].execute(**given).result[0]["samples"]

    first = sample(**sampling)
    second = sample(**larger, initial_latents={"samples": first}, strength=0.5)

    settings = pipeline.settings(**COMMON, **size)
    embeddings = pipeline.encode(PROMPT, settings)
    again, _ = denoise_again(
        pipeline, embeddings, pipeline.denoise(embeddings, settings), settings, SecondPass(2.0, 0.5)
    )
    wanted = pipeline.to_vae_scale(again).reshape(second.shape)
    if kind == "image":
        tiled = make_options(**NEUTRAL | {"mesh": "single"}, tile=" 48x32 ")
        by_tiles = sample(**larger, initial_latents={"samples": first}, strength=0.5, options=tiled)
        own = dataclasses.replace(settings, tile="48x32")
        again, _ = denoise_again(pipeline, embeddings, pipeline.denoise(embeddings, own), own, SecondPass(2.0, 0.5))
        tiles = {
            "by tiles": float((by_tiles - pipeline.to_vae_scale(again).reshape(second.shape)).abs().max()),
            "whole": float((by_tiles - second).abs().max()),
        }
    else:
        tiles = {}
    both = torch.cat((first, first.flip(-1)))
    odd = torch.nn.functional.interpolate(first.flatten(0, -3).unsqueeze(0), (3, 5))[0].unflatten(0, first.shape[:-2])
    frames = {"num_frames": 17} if "num_frames" in size else {}
    wrong = {
        "frames": {**larger, **frames, "initial_latents": {"samples": first}},
        "another model": {**larger, "initial_latents": {"samples": first[:, :3]}},
        "noise mask": {**larger, "initial_latents": {"samples": first, "noise_mask": first}},
        "no number": {**larger, "initial_latents": {"samples": first / 0}},
        "no latents": {**larger, "initial_latents": [first]},
        "strength": {**larger, "initial_latents": {"samples": first}, "strength": 0.1},
        "numbers": {**larger, "initial_latents": {"samples": both}, "options": RunOptions(num_videos=3)},
    }
    if kind == "video":
        wrong["fps"] = {**larger, "initial_latents": {"samples": first, "fps": 24}, "fps": 12}
        wrong["no sound"] = {**larger, "initial_latents": {"samples": first[:, :, :2]}}
    else:  # the VAE's latents of any image, of which a model makes even ones alone
        sample(**larger, initial_latents={"samples": odd}, strength=0.5)
    return {
        "difference": float((second - wanted).abs().max()),
        "another strength": float(
            (sample(**larger, initial_latents={"samples": first}, strength=0.75) - wanted).abs().max()
        ),
        **tiles,
        "without latents": float((sample(**larger) - wanted).abs().max()),
        "the first of two": float(
            (sample(**larger, initial_latents={"samples": both}, strength=0.5)[0] - wanted[0]).abs().max()
        ),
        "refused": {name: _outcome(nodes["TPUSampler"], given) for name, given in wrong.items()},
    }


def _outcome(node: Any, given: dict[str, Any]) -> str:
    try:
        node.execute(**given)
    except ComfyTpuError as error:
        return str(error)
    return "done"


if __name__ == "__main__":
    logging.disable()
    fake_comfyui.install(Path.cwd())
    sys.stdout.write(json.dumps({kind: run(kind) for kind in MODELS}) + "\n")
