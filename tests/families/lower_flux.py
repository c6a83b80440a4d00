"""Lowers every program of Flux.1 dev for eight v6e chips, without weights, memory or a TPU; returns their facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.flux import model as flux_model
from comfy_tpu.families.shared.published_configs import IMAGE_VAE, T5_XXL
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step

FAMILY = flux_model.FLUX_DEV
CLIP = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "eos_token_id": 2,
    "projection_dim": 768,
}
PLACEMENT = abstract_placement(MeshSizes(sp=2, tp=4), platform="tpu", chip="v6e")


def lower_programs(width: int, height: int) -> dict[str, Any]:
    latent = (1, 16, 1, height // 8, width // 8)
    config = FAMILY.card.published["black-forest-labs/FLUX.1-dev"]
    settings = dataclasses.replace(FAMILY.card.defaults, height=height, width=width)
    programs = lower_step(FAMILY, config, settings, PLACEMENT, latent[1])
    for encoder, config in zip(FAMILY.text.encoders, (CLIP, T5_XXL), strict=True):
        made = component(encoder.component, config, PLACEMENT)
        tokens = array(1, encoder.length or 512, dtype=INT32)
        programs[encoder.encode.__name__] = made.program(encoder.encode).export(
            "tpu", made.abstract_weights(), input_ids=tokens, attention_mask=tokens
        )
    vae = component(FAMILY.vae.component, IMAGE_VAE, PLACEMENT)
    axes = (None, None, None, None, MESH_AXES)
    programs["decode_frame"] = vae.program(FAMILY.vae.decode_frame, input_axes={"latent": axes}).export(
        "tpu", vae.abstract_weights(), latent=array(*latent), cache=None
    )
    return {name: facts(exported, sequence=4096) for name, exported in programs.items()}
