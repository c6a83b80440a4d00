"""Lowers every program of a Qwen-Image for eight TPUs, without weights, memory or a TPU; returns their facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.qwen_image.text import EDIT_TEMPLATE_TOKENS, TEMPLATE_TOKENS
from comfy_tpu.families.registry import load_families
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step

_COLUMNS = (None, None, None, None, MESH_AXES)


def lower_programs(hub_id: str, chip: str, sizes: MeshSizes) -> dict[str, Any]:
    """Of one square image, where the model sees images."""
    (family,) = (family for family in load_families() if hub_id in family.card.published)
    parts, placement = (
        part_configs("comfy_tpu.families.qwen_image", hub_id),
        abstract_placement(sizes, platform="tpu", chip=chip),
    )
    settings = dataclasses.replace(family.card.defaults, height=1024, width=1024)
    programs = lower_step(family, family.card.published[hub_id], settings, placement, 16)

    (encoder,) = family.text.encoders
    made = component(encoder.component, parts["text_encoder"], placement)
    text, _ = family.text.embedding_shapes(family.card.published[hub_id], settings)["text"]
    given: dict[str, Any] = {}
    template = TEMPLATE_TOKENS
    if encoder.read_images is not None:
        template = EDIT_TEMPLATE_TOKENS
        side = 14 if family.card.image is not None and family.card.image.max_images > 1 else 37
        given = {"pixels_1": array(side, side, 4, 1176), "positions": array(1, 3, template + text, dtype=INT32)}
    tokens = array(1, template + text, dtype=INT32)
    programs["encode_text"] = made.program(encoder.encode).export(
        "tpu", made.abstract_weights(), input_ids=tokens, attention_mask=tokens, **given
    )

    vae = component(family.vae.component, parts["vae"], placement)
    programs["decode_frame"] = vae.program(family.vae.decode_frame, input_axes={"latent": _COLUMNS}).export(
        "tpu", vae.abstract_weights(), latent=array(1, 16, 1, 128, 128), cache=None
    )
    if family.vae.encode_frames is not None:
        encode = vae.program(family.vae.encode_frames, input_axes={"pixels": _COLUMNS})
        programs["encode_frames"] = encode.export(
            "tpu", vae.abstract_weights(), pixels=array(1, 3, 1, 1024, 1024), cache=None
        )
    return {name: facts(exported, sequence=4096) for name, exported in programs.items()}
