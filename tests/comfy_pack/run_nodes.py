"""Runs the nodes of one family over the stand-in for ComfyUI, with a pipeline whose results are given.

    python tests/comfy_pack/run_nodes.py

prints one JSON object: by kind of results and by node, the error that its outputs were refused with, or "handed out".
`host`: CPU tensors; `meta`: tensors on another device; `jax`: JAX arrays, where a node hands on what it was given.
"""

import contextlib
import json
import logging
import sys
import types
from pathlib import Path

import fake_comfyui  # beside this file
import jax.numpy as jnp
import torch

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import EscapeError
from comfy_tpu.families.wan.card import CARD
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.video import VideoPipeline

SAMPLING = {"height": 64, "width": 64, "num_frames": 17, "num_inference_steps": 1, "guidance_scale": 5.0, "seed": 1}
CONDITIONING = [[torch.zeros(1, 512, 128), {}]]


def run(kind: str) -> dict[str, str]:
    from comfy_tpu.comfy import family_nodes  # which imports ComfyUI

    pipeline = VideoPipeline.open("demo", RuntimeConfig(mesh="single"))
    device = "cpu" if kind == "host" else "meta"
    tensor = torch.zeros(1, 17, 64, 64, 3, device=device)
    rows = {"text": torch.zeros(1, 512, 128, device=device)}
    replaced = {
        "encode_text": lambda *given: PromptEmbeddings("", rows, rows),
        "encode_media": lambda *given: {"condition": jnp.zeros(2) if kind == "jax" else tensor},
        "denoise": lambda *given: torch.zeros(1, 16, 5, 8, 8, device=device),
        "to_vae_scale": lambda latents: latents,
        "decode": lambda *given: iter([]),
    }
    for name, function in replaced.items():
        setattr(pipeline, name, function)
    pipeline.encode = lambda *given: PromptEmbeddings("", rows, rows)
    family_nodes.pipeline_run = lambda *given, **options: contextlib.nullcontext(pipeline)
    family_nodes.to_images = lambda parts, frames: tensor[0]
    family_nodes.to_video = lambda images, fps: types.SimpleNamespace(images=images)

    model = {"model_id": "demo"}
    latents = {"samples": torch.zeros(1, 16, 5, 8, 8)}
    image = torch.zeros(1, 64, 64, 3)
    embeds = {"prompt_embeds": CONDITIONING, "negative_prompt_embeds": CONDITIONING}
    given = {
        "Wan21TextEncoder": {"prompt": "a red circle", "negative_prompt": ""},
        "Wan21ImageEncoder": {"image": image, "height": 64, "width": 64, "num_frames": 17},
        "Wan21VideoEncoder": {"video": image.expand(17, -1, -1, -1), "height": 64, "width": 64, "num_frames": 17},
        "Wan21TPUSampler": SAMPLING | embeds,
        "Wan21TPUVAEDecoder": {"latents": latents, "fps": 8},
        "Wan21TPUPipeline": SAMPLING | {"prompt": "a red circle", "fps": 8},
    }
    nodes = {node.__name__: node for node in family_nodes.make_nodes(CARD.node_sets[0])}
    assert set(nodes) == set(given)
    return {name: outcome(node, given[name] | model) for name, node in nodes.items()}


def outcome(node: type, given: dict[str, object]) -> str:
    try:
        node.execute(**given)
    except EscapeError as error:
        return str(error)
    return "handed out"


if __name__ == "__main__":
    logging.disable()
    fake_comfyui.install(Path.cwd())
    sys.stdout.write(json.dumps({kind: run(kind) for kind in ("host", "meta", "jax")}) + "\n")
