"""Lowers every program of Wan 2.1 14B for eight v6e chips, without weights, memory or a TPU; returns their facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.families.wan import text as wan_text
from comfy_tpu.families.wan import vae as wan_vae
from comfy_tpu.families.wan.model import WAN21
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step, outputs

PLACEMENT = abstract_placement(MeshSizes(dp=2, sp=4), platform="tpu", chip="v6e")


def lower_programs(width: int, height: int, frames: int) -> dict[str, Any]:
    latent = (1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)
    configs = part_configs("comfy_tpu.families.wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers")
    programs = {}

    encoder = component(wan_text.TEXT_ENCODER, configs["text_encoder"], PLACEMENT)
    tokens = array(2, 512, dtype=INT32)
    programs["encode_text"] = encoder.program(wan_text.encode_text).export(
        "tpu", encoder.abstract_weights(), input_ids=tokens, attention_mask=tokens
    )

    settings = dataclasses.replace(WAN21.card.defaults, height=height, width=width, num_frames=frames)
    programs |= lower_step(WAN21, configs["transformer"], settings, PLACEMENT, latent[1])

    vae = component(wan_vae.VAE, configs["vae"], PLACEMENT)
    axes = (None, None, None, None, MESH_AXES)
    decode = vae.program(wan_vae.decode_frame, input_axes={"latent": axes, "cache": axes})
    cache = None
    for index in range(3):
        exported = decode.export("tpu", vae.abstract_weights(), latent=array(*latent[:2], 1, *latent[3:]), cache=cache)
        cache = outputs(exported)[1]
        programs[f"decode_frame {index}"] = exported
    return {name: facts(exported, sequence=30_000) for name, exported in programs.items()}
