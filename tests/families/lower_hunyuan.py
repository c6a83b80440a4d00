"""Lowers every program of HunyuanVideo-1.5 for eight v6e chips, without weights, memory or a TPU; prints what came out.

Arguments: width, height, frames.
"""

import sys
from typing import Any

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families import hunyuan, hunyuan_text, hunyuan_vae
from comfy_tpu.parallel.mesh import abstract_placement
from tests.lowering import BFLOAT16, INT32, array, component, export_step, facts, outputs, tell

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
SETTINGS = hunyuan.HUNYUAN15.defaults


def main(width: int, height: int, frames: int) -> dict[str, Any]:
    latent = (1, 32, (frames - 1) // 4 + 1, height // 16, width // 16)
    config = next(iter(hunyuan.PUBLISHED.values()))
    programs = {}
    for spec, encode, encoder_config, length in (
        (hunyuan_text.TEXT_ENCODER, hunyuan_text.encode_text, TEXT_ENCODER, 1108),
        (hunyuan_text.GLYPH_ENCODER, hunyuan_text.encode_glyphs, GLYPH_ENCODER, 256),
    ):
        encoder, tokens = component(spec, encoder_config, PLACEMENT), array(2, length, dtype=INT32)
        programs[encode.__name__] = encoder.program(encode).export(
            "tpu", encoder.abstract_weights(), input_ids=tokens, attention_mask=tokens
        )

    transformer = component(hunyuan.TRANSFORMER, config, PLACEMENT)
    weights = transformer.abstract_weights()
    rows = {
        name: array(2, *shape, dtype=BFLOAT16) for name, shape in hunyuan.embedding_shapes(config, SETTINGS).items()
    }
    axes = dict.fromkeys(rows, ("dp",))
    programs["prepare"] = transformer.program(hunyuan.prepare, input_axes=axes).export("tpu", weights, **rows)
    prepared = outputs(programs["prepare"])
    programs["denoise_step"] = export_step(transformer, hunyuan.predict, weights, latent, prepared, guided=True)

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


tell(main, *map(int, sys.argv[1:4]))
