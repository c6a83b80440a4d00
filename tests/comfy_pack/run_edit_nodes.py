"""The nodes of a model whose text encoder sees the images, over the stand-in for ComfyUI, with a small random model.

python tests/comfy_pack/run_edit_nodes.py

prints one JSON object: whether the three nodes make the image of the full pipeline, and how an image is refused.
"""

import contextlib
import json
import logging
import sys
from pathlib import Path

import fake_comfyui  # beside this file
import torch

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.families.qwen_image import image as qwen_image
from comfy_tpu.families.qwen_image.card import CARD
from comfy_tpu.families.qwen_image.model import QWEN_IMAGE_EDIT_PLUS
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import small_qwen_image

SAMPLING = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 4.0, "seed": 1}
PROMPTS = {"prompt": "a red circle", "negative_prompt": "blue"}


def run() -> dict[str, object]:
    from comfy_tpu.comfy import family_nodes  # which imports ComfyUI

    qwen_image.VAE_AREA, qwen_image.SHOWN_AREA = 64 * 64, 56 * 56
    pipeline = VideoPipeline.open(small_qwen_image.directory("plus"), RuntimeConfig(mesh="single"))
    assert pipeline.family is QWEN_IMAGE_EDIT_PLUS
    family_nodes.pipeline_run = lambda *given, **options: contextlib.nullcontext(pipeline)
    nodes = {node.KIND: node for node in family_nodes.make_nodes(CARD.node_sets[1])}
    generator = torch.Generator().manual_seed(0)
    images = {name: torch.rand(1, 60, 90, 3, generator=generator) for name in ("image", "image_2")}
    model = {"model_id": "small"}

    prompts = nodes["TextEncoder"].execute(**PROMPTS, **images, **model).result
    (embeds,) = nodes["ImageEncoder"].execute(**images, **model).result
    given = dict(zip(("prompt_embeds", "negative_prompt_embeds"), prompts, strict=True)) | SAMPLING | model
    (latents,) = nodes["TPUSampler"].execute(**given, image_embeds=embeds).result
    staged = nodes["TPUVAEDecoder"].execute(latents=latents, **model).result[0]
    whole = nodes["TPUPipeline"].execute(**PROMPTS, **images, **SAMPLING, **model).result[0]
    other = nodes["TPUPipeline"].execute(**PROMPTS, image=images["image"], **SAMPLING, **model).result[0]
    return {
        "text": [prompts[0][0][0].shape[1], pipeline.embedding_shapes(pipeline.settings(**SAMPLING))["text"][0]],
        # Not to the bit: latents between nodes have the VAE's scale.
        "difference": float((staged - whole).abs().max()),
        "difference of another request": float((other - whole).abs().max()),
        "without": _outcome(lambda: nodes["TPUSampler"].execute(**given)),
    }


def _outcome(call) -> str:
    try:
        call()
    except ComfyTpuError as error:
        return str(error)
    return "done"


if __name__ == "__main__":
    logging.disable()
    fake_comfyui.install(Path.cwd())
    sys.stdout.write(json.dumps(run()) + "\n")
