"""Random LoRAs for the small Flux.2 transformers; `small_flux_loras` writes them in the forms in which files come."""

from __future__ import annotations

from tests.families.small_flux_loras import Factors, peft_style
from tests.pipeline.small_loras import Tensors, random

HIDDEN, FFN, CHANNELS = 128, 384, 16
DOUBLE, SINGLE = 2, 3

# By the module's original name: what diffusers calls it, outputs and inputs.
DOUBLE_BLOCK = {
    "img_attn.proj": ("attn.to_out.0", HIDDEN, HIDDEN),
    "txt_attn.proj": ("attn.to_add_out", HIDDEN, HIDDEN),
    "img_mlp.0": ("ff.linear_in", 2 * FFN, HIDDEN),
    "img_mlp.2": ("ff.linear_out", HIDDEN, FFN),
    "txt_mlp.0": ("ff_context.linear_in", 2 * FFN, HIDDEN),
    "txt_mlp.2": ("ff_context.linear_out", HIDDEN, FFN),
}
FUSED = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
SINGLE_BLOCK = {
    "linear1": ("attn.to_qkv_mlp_proj", 3 * HIDDEN + 2 * FFN, HIDDEN),
    "linear2": ("attn.to_out", HIDDEN, HIDDEN + FFN),
}
TOP = {
    "img_in": ("x_embedder", HIDDEN, CHANNELS),
    "txt_in": ("context_embedder", HIDDEN, 48),
    "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1", HIDDEN, 32),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2", HIDDEN, HIDDEN),
    "final_layer.linear": ("proj_out", CHANNELS, HIDDEN),
}
MODULATIONS = {
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear", 6 * HIDDEN, HIDDEN),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear", 6 * HIDDEN, HIDDEN),
    "single_stream_modulation.lin": ("single_stream_modulation.linear", 3 * HIDDEN, HIDDEN),
    "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1", HIDDEN, 32),
    "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2", HIDDEN, HIDDEN),
}
LAST_NORM = "final_layer.adaLN_modulation.1"


def factors(rank: int = 4, seed: int = 1) -> Factors:
    in_block = {name: sizes for name, (_, *sizes) in DOUBLE_BLOCK.items()}
    in_block |= {name: [3 * HIDDEN, HIDDEN] for name in FUSED}
    every = {f"double_blocks.{n}.{name}": sizes for n in range(DOUBLE) for name, sizes in in_block.items()}
    every |= {f"single_blocks.{n}.{name}": sizes for n in range(SINGLE) for name, (_, *sizes) in SINGLE_BLOCK.items()}
    every |= {name: sizes for name, (_, *sizes) in (TOP | MODULATIONS).items()}
    every[LAST_NORM] = [2 * HIDDEN, HIDDEN]
    return {
        name: (random(outputs, rank, seed=1000 * seed + 2 * n), random(rank, inputs, seed=1000 * seed + 2 * n + 1))
        for n, (name, (outputs, inputs)) in enumerate(every.items())
    }


def in_diffusers(made: Factors) -> Factors:
    """The same change by diffusers' names, taken apart by hand."""
    parted: Factors = {}
    for name, (up, down) in made.items():
        if name == LAST_NORM:
            parted["norm_out.linear"] = (up.roll(HIDDEN, 0), down)  # scale and shift change places
        elif name in TOP | MODULATIONS:
            parted[(TOP | MODULATIONS)[name][0]] = (up, down)
        else:
            kind, number, rest = name.split(".", 2)
            before = f"{'transformer' if kind == 'double_blocks' else 'single_transformer'}_blocks.{number}."
            theirs = FUSED.get(rest) or ((DOUBLE_BLOCK | SINGLE_BLOCK)[rest][0],)
            for part, rows in zip(theirs, up.chunk(len(theirs)), strict=True):
                parted[before + part] = (rows, down)
    return parted


def diffusers_style(made: Factors) -> Tensors:
    return peft_style(in_diffusers(made))
