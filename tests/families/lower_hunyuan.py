"""Lowers all programs of HunyuanVideo-1.5 for eight v6e chips, without weights, memory or a TPU; returns the facts."""

import dataclasses
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.hunyuan_video import model as hunyuan_model
from comfy_tpu.families.hunyuan_video import text as hunyuan_text
from comfy_tpu.families.hunyuan_video import vae as hunyuan_vae
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import INT32, array, component, facts, lower_step, outputs

TEXT_ENCODER = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000.0,
}
GLYPH_ENCODER = {
    "vocab_size": 1510,
    "d_model": 1472,
    "d_kv": 64,
    "d_ff": 3584,
    "num_layers": 12,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
PLACEMENT = abstract_placement(MeshSizes(dp=2, sp=4), platform="tpu", chip="v6e")
SETTINGS = hunyuan_model.HUNYUAN15.card.defaults


def lower_programs(width: int, height: int, frames: int) -> dict[str, Any]:
    latent = (1, 32, (frames - 1) // 4 + 1, height // 16, width // 16)
    config = next(iter(hunyuan_model.HUNYUAN15.card.published.values()))
    programs = {}
    for spec, encode, encoder_config, length in (
        (hunyuan_text.TEXT_ENCODER, hunyuan_text.encode_text, TEXT_ENCODER, 1108),
        (hunyuan_text.GLYPH_ENCODER, hunyuan_text.encode_glyphs, GLYPH_ENCODER, 256),
    ):
        encoder, tokens = component(spec, encoder_config, PLACEMENT), array(2, length, dtype=INT32)
        programs[encode.__name__] = encoder.program(encode).export(
            "tpu", encoder.abstract_weights(), input_ids=tokens, attention_mask=tokens
        )

    settings = dataclasses.replace(SETTINGS, height=height, width=width, num_frames=frames)
    programs |= lower_step(hunyuan_model.HUNYUAN15, config, settings, PLACEMENT, latent[1])

    vae = component(hunyuan_vae.VAE, {}, PLACEMENT)
    columns = (None, None, None, None, MESH_AXES)
    decode = vae.program(hunyuan_vae.decode_frame, input_axes={"latent": columns, "cache": columns})
    cache: Any = [array(1, 1, latent[2], 1, 1)]
    for index in range(3):
        frame = array(*latent[:2], 1, *latent[3:])
        exported = decode.export("tpu", vae.abstract_weights(), latent=frame, cache=cache)
        cache = outputs(exported)[1]
        programs[f"decode_frame {index}"] = exported
    return {name: facts(exported, sequence=10_000) for name, exported in programs.items()}
