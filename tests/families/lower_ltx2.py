"""Lowers every program of LTX-2 or LTX-2.3 for TPU chips, without weights, memory or a TPU; returns their facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.ltx2 import model as ltx2_model
from comfy_tpu.families.ltx2 import text as ltx2_text
from comfy_tpu.families.ltx2 import vae as ltx2_vae
from comfy_tpu.families.shared import all_frames_vae
from comfy_tpu.families.shared.published import part_configs
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step

COLUMNS = (None, None, None, None, MESH_AXES)


def lower_programs(name: str, width: int, height: int, frames: int, chip: str, sizes: MeshSizes) -> dict[str, Any]:
    placement = abstract_placement(sizes, platform="tpu", chip=chip)
    family = ltx2_model.MODELS[name]
    hub_id, config = next(iter(family.card.published.items()))
    configs = part_configs("comfy_tpu.families.ltx2", hub_id)
    settings = dataclasses.replace(family.card.defaults, height=height, width=width, num_frames=frames)
    settings = dataclasses.replace(settings, stg_scale=1.0)
    latent = (1, 128, family.card.latent_frames(settings), height // 32, width // 32)
    programs = {}
    encoder, tokens = component(ltx2_text.TEXT_ENCODER, configs["text_encoder"], placement), array(2, 1024, dtype=INT32)
    programs["encode_text"] = encoder.program(ltx2_text.encode_text).export(
        "tpu", encoder.abstract_weights(), input_ids=tokens, attention_mask=tokens
    )
    connectors = component(ltx2_text.CONNECTORS, configs["connectors"], placement)
    programs["connect"] = connectors.program(ltx2_text.connect).export(
        "tpu",
        connectors.abstract_weights(),
        input_ids=tokens,
        attention_mask=tokens,
        layers=array(49, 2, 1024, 3840),
    )
    image = {"condition": array(4, 128, 1, *latent[3:])}
    for name, given in (("", None), (" from an image", image)):
        made = lower_step(family, config, settings, placement, latent[1], given)
        programs |= {f"{program}{name}": exported for program, exported in made.items()}

    vae = component(ltx2_vae.VAE, configs["vae"], placement)
    programs["decode_frame"] = vae.program(all_frames_vae.decode_frame, input_axes={"latent": COLUMNS}).export(
        "tpu", vae.abstract_weights(), latent=array(*latent), cache=None
    )
    programs["encode_frames"] = vae.program(all_frames_vae.encode_frames, input_axes={"pixels": COLUMNS}).export(
        "tpu", vae.abstract_weights(), pixels=array(1, 3, 1, height, width), cache=None
    )
    sound = family.sound
    assert sound is not None
    audio_vae, vocoder = (component(spec, configs[spec.name], placement) for spec in (sound.vae, sound.vocoder))
    count = family.card.sound_tokens(settings)
    programs["decode sound"] = audio_vae.program(sound.decode).export(
        "tpu", audio_vae.abstract_weights(), latents=array(1, count, 128)
    )
    programs["synthesize"] = vocoder.program(sound.synthesize).export(
        "tpu", vocoder.abstract_weights(), spectrogram=array(1, 2, 4 * count - 3, 64)
    )
    return {name: facts(exported, sequence=6_000) for name, exported in programs.items()}
