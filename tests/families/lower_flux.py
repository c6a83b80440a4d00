"""Lowers every program of Flux.1 dev for eight v6e chips, without weights, memory or a TPU; returns their facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.flux import model as flux_model
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step

FAMILY = flux_model.FLUX_DEV
PLACEMENT = abstract_placement(MeshSizes(sp=2, tp=4), platform="tpu", chip="v6e")


def lower_programs(width: int, height: int) -> dict[str, Any]:
    latent = (1, 16, 1, height // 8, width // 8)
    configs = part_configs("comfy_tpu.families.flux", "black-forest-labs/FLUX.1-dev")
    settings = dataclasses.replace(FAMILY.card.defaults, height=height, width=width)
    programs = lower_step(FAMILY, configs["transformer"], settings, PLACEMENT, latent[1])
    for encoder in FAMILY.text.encoders:
        made = component(encoder.component, configs[encoder.component.name], PLACEMENT)
        tokens = array(1, encoder.length or 512, dtype=INT32)
        programs[encoder.encode.__name__] = made.program(encoder.encode).export(
            "tpu", made.abstract_weights(), input_ids=tokens, attention_mask=tokens
        )
    vae = component(FAMILY.vae.component, configs["vae"], PLACEMENT)
    axes = (None, None, None, None, MESH_AXES)
    programs["decode_frame"] = vae.program(FAMILY.vae.decode_frame, input_axes={"latent": axes}).export(
        "tpu", vae.abstract_weights(), latent=array(*latent), cache=None
    )
    return {name: facts(exported, sequence=4096) for name, exported in programs.items()}
