"""Lowers every program of HunyuanVideo-1.5 for eight v6e chips, without weights, memory or a TPU; prints what came out.

Arguments: width, height, frames.
"""

import json
import re
import sys
import time
from typing import Any

import jax
import jax.export
import numpy as np
import torch

from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families import hunyuan, hunyuan_text, hunyuan_vae
from comfy_tpu.families.family import Config
from comfy_tpu.parallel.mesh import abstract_placement
from comfy_tpu.pipeline.denoise import make_step
from comfy_tpu.pipeline.schedule import HISTORY
from tests.peak_memory import peak_bytes

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
BFLOAT16, FLOAT32, INT32 = np.dtype("bfloat16"), np.dtype("float32"), np.dtype("int32")
SETTINGS = hunyuan.HUNYUAN15.defaults


def array(*shape: int, dtype: np.dtype = FLOAT32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def component(spec: ComponentSpec, config: Config) -> Component:
    return Component(spec, config, PLACEMENT, dtype=torch.bfloat16)


def outputs(exported: jax.export.Exported) -> Any:
    avals = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return jax.tree.map(lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype), avals)


def facts(exported: jax.export.Exported) -> dict[str, Any]:
    text = exported.mlir_module()
    return {
        "platforms": list(exported.platforms),
        "devices": exported.nr_devices,
        "kernels": text.count("tpu_custom_call"),
        "loops": text.count("stablehlo.while"),
        "all to all": text.count("stablehlo.all_to_all"),
        "megabytes": len(exported.mlir_module_serialized) / 1e6,
        "outputs": [list(aval.shape) for aval in exported.out_avals],
        "sequences in one array": max(sum(size >= 10_000 for size in shape) for shape in _shapes(text)),
    }


def _shapes(text: str) -> list[list[int]]:
    found = set(re.findall(r"tensor<((?:\d+x)+)\w+>", text))
    return [[int(size) for size in shape.split("x")[:-1]] for shape in found]


def main(width: int, height: int, frames: int) -> tuple[dict[str, Any], float]:
    latent = (1, 32, (frames - 1) // 4 + 1, height // 16, width // 16)
    config = next(iter(hunyuan.PUBLISHED.values()))
    programs = {}
    for spec, encode, encoder_config, length in (
        (hunyuan_text.TEXT_ENCODER, hunyuan_text.encode_text, TEXT_ENCODER, 1108),
        (hunyuan_text.GLYPH_ENCODER, hunyuan_text.encode_glyphs, GLYPH_ENCODER, 256),
    ):
        encoder, tokens = component(spec, encoder_config), array(2, length, dtype=INT32)
        programs[encode.__name__] = encoder.program(encode).export(
            "tpu", encoder.abstract_weights(), input_ids=tokens, attention_mask=tokens
        )

    begin = time.process_time()
    transformer = component(hunyuan.TRANSFORMER, config)
    weights = transformer.abstract_weights()
    rows = {
        name: array(2, *shape, dtype=BFLOAT16) for name, shape in hunyuan.embedding_shapes(config, SETTINGS).items()
    }
    axes = dict.fromkeys(rows, ("dp",))
    programs["prepare"] = transformer.program(hunyuan.prepare, input_axes=axes).export("tpu", weights, **rows)
    step = transformer.program(
        make_step(hunyuan.predict), static=("guided",), input_axes={"prepared": ("dp",)}, output_axes=()
    )
    programs["denoise_step"] = step.export(
        "tpu",
        weights,
        samples=[array(*latent)] * HISTORY,
        outputs=[array(*latent)] * HISTORY,
        coefficients=array(2 * HISTORY),
        timestep=array(1),
        guidance_scale=array(),
        prepared=outputs(programs["prepare"]),
        guided=True,
    )
    transformer_seconds = time.process_time() - begin

    vae = component(hunyuan_vae.VAE, {})
    columns = (None, None, None, None, MESH_AXES)
    decode = vae.program(hunyuan_vae.decode_frame, input_axes={"latent": columns, "cache": columns})
    cache: Any = [array(1, 1, latent[2], 1, 1)]
    for index in range(3):
        frame = array(*latent[:2], 1, *latent[3:])
        exported = decode.export("tpu", vae.abstract_weights(), latent=frame, cache=cache)
        cache = outputs(exported)[1]
        programs[f"decode_frame {index}"] = exported
    return {name: facts(exported) for name, exported in programs.items()}, transformer_seconds


begin = time.process_time()
programs, transformer_seconds = main(*map(int, sys.argv[1:4]))
report = {
    "programs": programs,
    "transformer seconds": transformer_seconds,
    "seconds": time.process_time() - begin,
    "peak": peak_bytes(),
}
sys.stdout.write(json.dumps(report) + "\n")
