"""Lowers every program of a Flux.2 for eight v6e chips, without weights, memory or a TPU; returns their facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.flux2.model import FLUX2_DEV, FLUX2_KLEIN
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step

QWEN_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
MISTRAL_24B = {
    "text_config": {
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "sliding_window": None,
    }
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 32,
}
MODELS: dict[str, tuple[ModelFamily, dict[str, Any]]] = {
    "black-forest-labs/FLUX.2-klein-4B": (FLUX2_KLEIN, QWEN_4B),
    "black-forest-labs/FLUX.2-dev": (FLUX2_DEV, MISTRAL_24B),
}
PLACEMENT = abstract_placement(MeshSizes(sp=2, tp=4), platform="tpu", chip="v6e")


def lower_programs(model: str, width: int, height: int) -> dict[str, Any]:
    family, text_config = MODELS[model]
    latent = (1, 128, 1, height // 16, width // 16)
    settings = dataclasses.replace(family.card.defaults, height=height, width=width)
    programs = lower_step(family, family.card.published[model], settings, PLACEMENT, latent[1])
    (encoder,) = family.text.encoders
    made = component(encoder.component, text_config, PLACEMENT)
    tokens = array(1, 512, dtype=INT32)
    programs["encode_text"] = made.program(encoder.encode).export(
        "tpu", made.abstract_weights(), input_ids=tokens, attention_mask=tokens
    )
    vae = component(family.vae.component, VAE, PLACEMENT)
    axes = (None, None, None, None, MESH_AXES)
    programs["decode_frame"] = vae.program(family.vae.decode_frame, input_axes={"latent": axes}).export(
        "tpu", vae.abstract_weights(), latent=array(*latent), cache=None
    )
    return {name: facts(exported, sequence=4096) for name, exported in programs.items()}
