"""Random LoRAs for the small Flux transformers, in the forms in which files come."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from tests.families import small_flux
from tests.pipeline.small_loras import Tensors, random

HIDDEN, FFN, CHANNELS = 128, 512, 16
DOUBLE, SINGLE = 2, 3

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""(up, down) by the module's original name."""

DOUBLE_BLOCK = {
    f"{stream}_{name}": size
    for stream in ("img", "txt")
    for name, size in {
        "attn.qkv": (3 * HIDDEN, HIDDEN),
        "attn.proj": (HIDDEN, HIDDEN),
        "mlp.0": (FFN, HIDDEN),
        "mlp.2": (HIDDEN, FFN),
        "mod.lin": (6 * HIDDEN, HIDDEN),
    }.items()
}
SINGLE_BLOCK = {
    "linear1": (3 * HIDDEN + FFN, HIDDEN),
    "linear2": (HIDDEN, HIDDEN + FFN),
    "modulation.lin": (3 * HIDDEN, HIDDEN),
}
TOP = {
    "img_in": (HIDDEN, CHANNELS),
    "txt_in": (HIDDEN, 16),
    "time_in.in_layer": (HIDDEN, 256),
    "vector_in.out_layer": (HIDDEN, HIDDEN),
    "final_layer.linear": (CHANNELS, HIDDEN),
    "final_layer.adaLN_modulation.1": (2 * HIDDEN, HIDDEN),
}

# What diffusers calls them; several where they are several there.
_PLAIN = {
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "linear2": "proj_out",
    "modulation.lin": "norm.linear",
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
_SEVERAL = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
}


def factors(rank: int = 4, seed: int = 1, *, top: bool = True) -> Factors:
    sizes = {f"double_blocks.{n}.{name}": size for n in range(DOUBLE) for name, size in DOUBLE_BLOCK.items()}
    sizes |= {f"single_blocks.{n}.{name}": size for n in range(SINGLE) for name, size in SINGLE_BLOCK.items()}
    sizes |= TOP if top else {}
    return {
        name: (random(outputs, rank, seed=1000 * seed + 2 * n), random(rank, inputs, seed=1000 * seed + 2 * n + 1))
        for n, (name, (outputs, inputs)) in enumerate(sizes.items())
    }


def in_diffusers(made: Factors) -> Factors:
    """The same change by diffusers' names, taken apart by hand."""
    parted: Factors = {}
    for name, (up, down) in made.items():
        before, rest = "", name
        if name.startswith(("double_blocks.", "single_blocks.")):
            kind, number, rest = name.split(".", 2)
            before = f"{'transformer' if kind == 'double_blocks' else 'single_transformer'}_blocks.{number}."
        if rest in _SEVERAL:
            sizes = [HIDDEN, HIDDEN, HIDDEN, FFN][: len(_SEVERAL[rest])]
            for part, rows in zip(_SEVERAL[rest], up.split(sizes), strict=True):
                parted[before + part] = (rows, down)
        elif rest == "final_layer.adaLN_modulation.1":
            shift, scale = up.chunk(2)
            parted["norm_out.linear"] = (torch.cat((scale, shift)), down)
        else:
            parted[before + _PLAIN[rest]] = (up, down)
    return parted


def diffusers_style(made: Factors) -> Tensors:
    return peft_style(in_diffusers(made))


def peft_style(parted: Factors) -> Tensors:
    """Of what has diffusers' names."""
    tensors = {}
    for name, (up, down) in parted.items():
        tensors |= {f"transformer.{name}.lora_A.weight": down, f"transformer.{name}.lora_B.weight": up}
    return tensors


def kohya_style(made: Factors, alpha: float | None = None) -> Tensors:
    tensors = {}
    for name, (up, down) in made.items():
        name = f"lora_unet_{name.replace('.', '_')}"
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def comfy_style(made: Factors, alpha: float | None = None) -> Tensors:
    tensors = {}
    for name, (up, down) in made.items():
        name = f"diffusion_model.{name}"
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def original_style(made: Factors) -> Tensors:
    tensors = {}
    for name, (up, down) in made.items():
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    return tensors


def fused(path: Path, strength: float, variant: str = "dev") -> Tensors:
    """The weights of the small transformer after diffusers has put the LoRA into them."""
    return fused_into(small_flux.reference(variant), path, strength)


def fused_into(reference: DiffusionPipeline, path: Path, strength: float) -> Tensors:
    parts = dict(reference.components)
    pipeline = type(reference)(**parts | {"transformer": copy.deepcopy(parts["transformer"])})
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="own")
    pipeline.set_adapters(["own"], [strength])
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    return pipeline.transformer.state_dict()
