"""Lowers what families that begin with an image have besides the transformer, for eight v6e chips and without weights.

The encoder that looks at the image, the VAE's encoder, and the 5B's VAE. Returns the facts of each program.
"""

from typing import Any

import jax.export

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.hunyuan_video.model import HUNYUAN15_IMAGE
from comfy_tpu.families.media import first_frame_clips
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.wan.model import WAN21_IMAGE, WAN22_5B
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import array, component, facts, outputs

CLIP = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
}
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
VAE_OF_5B = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "in_channels": 12,
    "out_channels": 12,
    "is_residual": True,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
FAMILIES: dict[str, tuple[ModelFamily, dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "wan": (WAN21_IMAGE, {}, CLIP, (720, 1280)),
    "5b": (WAN22_5B, VAE_OF_5B, {}, (704, 1280)),
    "hunyuan": (HUNYUAN15_IMAGE, {}, SIGLIP, (720, 1280)),
}
PLACEMENT = abstract_placement(MeshSizes(dp=2, sp=4), platform="tpu", chip="v6e")
COLUMNS = (None, None, None, None, MESH_AXES)


def lower_programs(name: str) -> dict[str, Any]:
    family, vae_config, encoder_config, (height, width) = FAMILIES[name]
    image = family.media
    assert image is not None
    programs: dict[str, jax.export.Exported] = {}
    if image.encoder is not None and image.embed is not None:
        encoder, side = component(image.encoder, encoder_config, PLACEMENT), encoder_config["image_size"]
        programs["embed_image"] = encoder.program(image.embed).export(
            "tpu", encoder.abstract_weights(), pixel_values=array(1, 3, side, side)
        )

    vae = component(family.vae.component, vae_config, PLACEMENT)
    weights = vae.abstract_weights()
    assert family.vae.encode_frames is not None
    encode = vae.program(family.vae.encode_frames, input_axes={"pixels": COLUMNS, "cache": COLUMNS})
    cache = None
    for index, frames in enumerate((1,) if image.clips is first_frame_clips else (1, 4, 4)):
        exported = encode.export("tpu", weights, pixels=array(1, 3, frames, height, width), cache=cache)
        programs[f"encode_frames {index}"] = exported
        latent, cache = outputs(exported)
    if name == "5b":
        decode = vae.program(family.vae.decode_frame, input_axes={"latent": COLUMNS, "cache": COLUMNS})
        cache = None
        for index in range(2):
            exported = decode.export("tpu", weights, latent=array(*latent.shape), cache=cache)
            programs[f"decode_frame {index}"] = exported
            cache = outputs(exported)[1]
    return {program: facts(exported, sequence=30_000) for program, exported in programs.items()}
