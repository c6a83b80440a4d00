"""Lowers every program of LTX-Video for eight v6e chips, without weights, memory or a TPU; returns their facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.ltx_video import model as ltx_model
from comfy_tpu.families.ltx_video import text as ltx_text
from comfy_tpu.families.ltx_video import vae as ltx_vae
from comfy_tpu.families.shared import all_frames_vae
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.families.shared.text_encoders import t5_component
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step

PLACEMENT = abstract_placement(MeshSizes(dp=2, sp=4), platform="tpu", chip="v6e")
COLUMNS = (None, None, None, None, MESH_AXES)


def lower_programs(width: int, height: int, frames: int) -> dict[str, Any]:
    latent = (1, 128, (frames - 1) // 8 + 1, height // 32, width // 32)
    config, settings = ltx_model.LTX_VIDEO.card.published["Lightricks/LTX-Video"], ltx_model.LTX_VIDEO.card.defaults
    configs = part_configs("comfy_tpu.families.ltx_video", "Lightricks/LTX-Video")
    programs = {}
    encoder, tokens = (
        component(t5_component("text_encoder"), configs["text_encoder"], PLACEMENT),
        array(2, 128, dtype=INT32),
    )
    programs["encode_text"] = encoder.program(ltx_text.encode_text).export(
        "tpu", encoder.abstract_weights(), input_ids=tokens, attention_mask=tokens
    )

    settings = dataclasses.replace(settings, height=height, width=width, num_frames=frames)
    image = {"condition": array(2, 128, 1, *latent[3:])}
    for name, given in (("", None), (" from an image", image)):
        made = lower_step(ltx_model.LTX_VIDEO, config, settings, PLACEMENT, latent[1], given)
        programs |= {f"{program}{name}": exported for program, exported in made.items()}

    vae = component(ltx_vae.VAE, configs["vae"], PLACEMENT)
    programs["decode_frame"] = vae.program(all_frames_vae.decode_frame, input_axes={"latent": COLUMNS}).export(
        "tpu", vae.abstract_weights(), latent=array(*latent), cache=None
    )
    programs["encode_frames"] = vae.program(all_frames_vae.encode_frames, input_axes={"pixels": COLUMNS}).export(
        "tpu", vae.abstract_weights(), pixels=array(1, 3, 1, height, width), cache=None
    )
    return {name: facts(exported, sequence=13_000) for name, exported in programs.items()}
