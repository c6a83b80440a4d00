"""Lowers every program of a Flux.2 for eight v6e chips, without weights, memory or a TPU; prints what came out.

Arguments: the model's id on the hub, width, height.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.export
import numpy as np
import torch

from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.families.family import VideoFamily
from comfy_tpu.families.flux2 import FLUX2_DEV, FLUX2_KLEIN
from comfy_tpu.parallel.mesh import abstract_placement
from comfy_tpu.pipeline.denoise import make_step
from comfy_tpu.pipeline.schedule import HISTORY
from tests.peak_memory import peak_bytes

QWEN_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
MISTRAL_24B = {
    "text_config": {
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "sliding_window": None,
    }
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 32,
}
MODELS: dict[str, tuple[VideoFamily, dict[str, Any]]] = {
    "black-forest-labs/FLUX.2-klein-4B": (FLUX2_KLEIN, QWEN_4B),
    "black-forest-labs/FLUX.2-dev": (FLUX2_DEV, MISTRAL_24B),
}
PLACEMENT = abstract_placement(MeshSizes(sp=2, tp=4), platform="tpu", chip="v6e")
BFLOAT16, FLOAT32, INT32 = np.dtype("bfloat16"), np.dtype("float32"), np.dtype("int32")


def array(*shape: int, dtype: np.dtype = FLOAT32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def component(spec: ComponentSpec, config: Mapping[str, Any]) -> Component:
    return Component(spec, config, PLACEMENT, dtype=torch.bfloat16)


def facts(exported: jax.export.Exported) -> dict[str, Any]:
    text = exported.mlir_module()
    return {
        "platforms": list(exported.platforms),
        "devices": exported.nr_devices,
        "kernels": text.count("tpu_custom_call"),
        "loops": text.count("stablehlo.while"),
        "megabytes": len(exported.mlir_module_serialized) / 1e6,
        "outputs": [list(aval.shape) for aval in exported.out_avals],
    }


def transformer(family: VideoFamily, model: str, latent: tuple[int, ...]) -> dict[str, jax.export.Exported]:
    config = family.published[model]
    made = component(family.transformer, config)
    weights = made.abstract_weights()
    prepare = made.program(family.prepare).export(
        "tpu", weights, text=array(1, 512, config["joint_attention_dim"], dtype=BFLOAT16)
    )
    avals = jax.tree.unflatten(prepare.out_tree, prepare.out_avals)
    step = made.program(make_step(family.predict), static=("guided",), output_axes=()).export(
        "tpu",
        weights,
        samples=[array(*latent)] * HISTORY,
        outputs=[array(*latent)] * HISTORY,
        coefficients=array(2 * HISTORY),
        timestep=array(1),
        guidance_scale=array(),
        prepared={name: array(*aval.shape, dtype=aval.dtype) for name, aval in avals.items()},
        guided=False,
    )
    return {"prepare": prepare, "denoise_step": step}


def main(model: str, width: int, height: int) -> dict[str, Any]:
    family, text_config = MODELS[model]
    latent = (1, 128, 1, height // 16, width // 16)
    begin = time.perf_counter()
    programs = transformer(family, model, latent)
    seconds = time.perf_counter() - begin
    (encoder,) = family.text_encoders
    made = component(encoder.component, text_config)
    tokens = array(1, 512, dtype=INT32)
    programs["encode_text"] = made.program(encoder.encode).export(
        "tpu", made.abstract_weights(), input_ids=tokens, attention_mask=tokens
    )
    vae = component(family.vae, VAE)
    axes = (None, None, None, None, MESH_AXES)
    programs["decode_frame"] = vae.program(family.decode_frame, input_axes={"latent": axes}).export(
        "tpu", vae.abstract_weights(), latent=array(*latent), cache=None
    )
    found = {name: facts(exported) for name, exported in programs.items()}
    return {"programs": found, "transformer seconds": seconds}


report = main(sys.argv[1], *map(int, sys.argv[2:4]))
report["seconds"] = time.process_time()
report["peak"] = peak_bytes()
sys.stdout.write(json.dumps(report) + "\n")
