"""Runs TPU Options and the nodes behind it over the stand-in for ComfyUI, on eight CPU devices.

    python tests/comfy_pack/run_options.py

prints one JSON object: the meshes of the pipelines that nodes opened, the shapes that they gave, and the errors of bad
values with their fields. Pipelines are real; their stages give zeros.
"""

import contextlib
import json
import logging
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import fake_comfyui  # beside this file
import torch

from comfy_tpu.config import RunOptions
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.families.wan.card import CARD
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.video import VideoPipeline
from tests.comfy_pack.neutral_options import NEUTRAL

SAMPLING = {"height": 64, "width": 64, "num_frames": 17, "num_inference_steps": 1, "guidance_scale": 5.0, "seed": 1}
ROWS = {"text": torch.zeros(1, 512, 128)}
BAD = {
    "mesh": "dp=2,xp=4",
    "attention_window": "4x16x16",
    "attention_blocks": "100,100,100",
    "dense_max_tokens": 0,
    "num_videos": 1.5,
    "context_frames": 17.5,
}
FOR_FAMILIES = {
    "quantize": "int8",
    "vae_backend": "nnx",
    "reuse": 0.12,
    "guidance_until": 0.5,
    "num_videos": 2,
    "attention_window": "video",
    "fast": True,
    "context": "uniform",
    "context_overlap": 8,
    "preset": "4step",
    "tiny_vae": "a_model.safetensors",
}


def node_options(**chosen: object) -> RunOptions:
    from comfy_tpu.comfy.options_node import TPUOptions

    (made,) = TPUOptions.execute(**NEUTRAL | chosen).result
    return made


def run() -> dict[str, object]:
    from comfy_tpu.comfy import compile_nodes, family_nodes, models  # which import ComfyUI

    used, sampled = [], []

    def denoise(pipeline, settings):
        sampled.append(settings)
        return torch.zeros(pipeline.latent_shape(settings))

    @contextlib.contextmanager
    def pipeline_run(family, model_id, stages, options, loras=()):
        pipeline = models.open_pipeline(model_id, family, lambda: None, options)
        pipeline.use_loras(loras, options.preset)
        used.append(pipeline)
        pipeline.encode_text = pipeline.encode = lambda *given: PromptEmbeddings("", ROWS, ROWS)
        pipeline.denoise = lambda embeddings, settings, *given: denoise(pipeline, settings)
        pipeline.decode = lambda latents, settings: iter(
            [torch.arange(settings.num_videos).view(-1, 1, 1, 1, 1).expand(-1, settings.num_frames, 64, 64, 3) * 1.0]
        )
        yield pipeline

    family_nodes.pipeline_run = pipeline_run
    family_nodes.to_video = lambda images, fps: None
    encoder, *_, sampler, decoder, pipeline = family_nodes.make_nodes(CARD.node_sets[0])
    seed_layout, other = node_options(mesh="dp=2,tp=4", num_videos=2), node_options(mesh="sp=8", dtype="bfloat16")
    embeds = {name: [[ROWS["text"], {}]] for name in ("prompt_embeds", "negative_prompt_embeds")}
    common = {"model_id": "demo", "options": seed_layout}
    encoder.execute(prompt="a circle", negative_prompt="", **common)
    latents, _ = sampler.execute(**SAMPLING, **embeds, **common).result
    frames = decoder.execute(latents=latents, fps=8, **common).result[0]
    whole = pipeline.execute(prompt="a circle", fps=8, **SAMPLING, **common).result[0]
    first = used[-1]
    sampler.execute(**SAMPLING, **embeds, model_id="demo", options=other)
    sampler.execute(**SAMPLING, **embeds, model_id="demo")
    sampler.execute(**SAMPLING, **embeds, **common)
    few = node_options(preset="4step")
    sampler.execute(**SAMPLING, **embeds, model_id="demo", options=few)
    few_loras = [len(used.pop().loras.opened)]
    pipeline.execute(prompt="a circle", fps=8, **SAMPLING, model_id="demo", options=few)
    few_loras.append(len(used.pop().loras.opened))  # at once: the next run with these chips takes them off
    few_settings = sampled[-2:]
    names = ("num_inference_steps", "guidance_scale", "scheduler", "flow_shift", "seed")
    long = SAMPLING | {"num_frames": 161}  # beyond the widget: over a link
    windows = node_options(context="uniform", context_overlap=8, context_stride=2)
    sampler.execute(**long, **embeds, model_id="demo", options=windows)
    chosen = sampled[-1]
    return {
        "preset": {
            "settings": [[getattr(settings, name) for name in names] for settings in (sampled[0], *few_settings)],
            "loras": few_loras,
            "unknown": refusal(
                sampler.execute, **SAMPLING, **embeds, model_id="demo", options=node_options(preset="8step")
            ),
        },
        "context": [
            chosen.num_frames,
            *(getattr(chosen, f"context{part}") for part in ("", "_frames", "_overlap", "_weights", "_stride")),
        ],
        "meshes": [str(each.placement.sizes) for each in used[:-1]],
        "dtypes": [each.dtype_name for each in used[:-1]],
        "devices": first.placement.mesh.devices.size,
        "kept": used[-2] is first and len({id(each) for each in used[:-1]}) == 3,
        "latents": list(latents["samples"].shape),
        "frames": [list(images.shape) for images in (frames, whole)],
        "firsts": whole[:: SAMPLING["num_frames"], 0, 0, 0].tolist(),
        "fast": {
            name: [options.reuse, options.guidance_until, options.runtime.quantize, options.runtime.fast is not None]
            for name, options in {
                "off": node_options(fast=False),
                "on": node_options(fast=True),
                "beside others": node_options(fast=True, reuse=0.05, guidance_until=0.9, quantize="int8"),
            }.items()
        },
        "bad": {name: refusal(node_options, **{name: value}) for name, value in BAD.items()},
        "bad at run": {
            name: refusal(sampler.execute, **SAMPLING, **embeds, model_id="demo", options=options)
            for name, options in {
                "reuse": node_options(reuse=7.0),
                "mesh": node_options(mesh="tp=16"),
                "context_overlap": node_options(context_overlap=90),
                "options": "dp=2",
            }.items()
        },
        "compile": {
            name: refusal(compile_nodes._read, {}, node_options(**{name: value}))
            for name, value in FOR_FAMILIES.items()
        },
        "downloads": ask_for_downloads(models, sampler, **SAMPLING, **embeds),
        "choices": str(
            compile_nodes._read(
                {"mesh": "single", "precision": "auto", "attention": "auto"},
                node_options(mesh="dp=2,tp=4", dtype="float32", attention="splash", attention_blocks="256,256,128"),
            )
        ),
    }


def ask_for_downloads(models, sampler, **given) -> dict[str, list[str | None]]:
    """Refusals of a sampler of a published model that is not here; nothing is downloaded or opened."""

    def stop(message, field=None):
        raise InvalidValueError(message, field=field)

    models.check_allowed = lambda model, *, field: stop(f"{model} is large", field)
    VideoPipeline.open = lambda *given, **named: stop("it is downloaded")
    model = CARD.node_sets[0].hub_models[0]
    options = {"off": None, "on": node_options(allow_download=True)}
    return {name: refusal(sampler.execute, **given, model_id=model, options=each) for name, each in options.items()}


def refusal(call, *given, **named) -> list[str | None]:
    try:
        call(*given, **named)
    except ComfyTpuError as error:
        return [error.field, str(error)]
    return [None, "accepted"]


if __name__ == "__main__":
    logging.disable()
    fake_comfyui.install(Path.cwd())
    sys.stdout.write(json.dumps(run()) + "\n")
