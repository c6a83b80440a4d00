"""Lowers every program of a Z-Image for eight TPUs, without weights, memory or a TPU; returns their facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.registry import load_family
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step


def lower_programs(model: str, hub_id: str, chip: str, sizes: MeshSizes) -> dict[str, Any]:
    """`model`: the card's name."""
    family, placement = load_family(model), abstract_placement(sizes, platform="tpu", chip=chip)
    settings = dataclasses.replace(family.card.defaults, height=1024, width=1024)
    programs = lower_step(family, family.card.published[hub_id], settings, placement, 16)
    configs = part_configs("comfy_tpu.families.z_image", hub_id)
    (encoder,) = family.text.encoders
    made = component(encoder.component, configs["text_encoder"], placement)
    tokens = array(1, 512, dtype=INT32)
    programs["encode_text"] = made.program(encoder.encode).export(
        "tpu", made.abstract_weights(), input_ids=tokens, attention_mask=tokens
    )
    vae, columns = component(family.vae.component, configs["vae"], placement), (None, None, None, None, MESH_AXES)
    programs["decode_frame"] = vae.program(family.vae.decode_frame, input_axes={"latent": columns}).export(
        "tpu", vae.abstract_weights(), latent=array(1, 16, 1, 128, 128), cache=None
    )
    return {name: facts(exported, sequence=4096) for name, exported in programs.items()}
