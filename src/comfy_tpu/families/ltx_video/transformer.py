"""The LTX-Video transformer: diffusers' modules with processors that XLA compiles well, and one step of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain, rotate_pairs, video_attention
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.all_frames_vae import SPATIAL_SCALE, TEMPORAL_SCALE
from comfy_tpu.families.shared.first_frame import expand_to_tokens, replace_first_frame
from comfy_tpu.families.shared.rotary import join_axes
from comfy_tpu.parallel.rules import column, gather, replicate, row


class VideoProcessor:
    """diffusers' attention processor among the tokens of a video, with RoPE tables of half the width, by heads."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> torch.Tensor:
        query = rotate_pairs(attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)), *image_rotary_emb)
        key, value = keys_and_values(attn, hidden_states)
        q, k, v = (x.transpose(1, 2) for x in (query, rotate_pairs(key, *image_rotary_emb), value))
        return _project(attn, video_attention(q, k, v), query)


class PromptProcessor:
    """Attention to the prompt, whose keys and values are given; `attention_mask` masks its padding."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> torch.Tensor:
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        q, k, v = (x.transpose(1, 2) for x in (query, attn.prompt_key, attn.prompt_value))
        return _project(attn, F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask), query)


def keys_and_values(attn: Any, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens, heads, head_dim] each."""
    key = attn.norm_k(attn.to_k(context)).unflatten(2, (attn.heads, -1))
    return key, attn.to_v(context).unflatten(2, (attn.heads, -1))


def _project(attn: Any, out: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2, 3).type_as(like)))


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    patch = tuple(config.get(name, 1) for name in ("patch_size_t", "patch_size", "patch_size"))
    if patch != (1, 1, 1):
        raise UnsupportedError(
            f"the transformer takes patches of {' × '.join(map(str, patch))} latents, and every LTX-Video that was "
            "published takes single ones; use one of those"
        )
    model = LTXVideoTransformer3DModel.from_config(dict(config))
    for block in model.transformer_blocks:
        block.attn1.processor, block.attn2.processor = VideoProcessor(), PromptProcessor()
        for name in ("prompt_key", "prompt_value"):
            block.attn2.register_buffer(name, None)
    return model


TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("LTXVideoTransformer3DModel",),
    heads="num_attention_heads",
    build=_build_transformer,
    stacks=(LayerStack("transformer_blocks"),),
    float32=("time_embed.*",),
    # Not the keys and values of the prompt: they are computed once.
    quantized=(
        "transformer_blocks.*.attn1.to_*",
        "transformer_blocks.*.attn2.to_q",
        "transformer_blocks.*.attn2.to_out.0",
        "transformer_blocks.*.ff.net.*",
    ),
    rules=(
        column("transformer_blocks.*.attn[12].to_[qkv].*"),
        column("transformer_blocks.*.attn[12].norm_[qk].weight"),  # over all heads at once, so it follows the columns
        row("transformer_blocks.*.attn[12].to_out.0.weight"),
        replicate("transformer_blocks.*.attn[12].to_out.0.bias"),
        column("transformer_blocks.*.ff.net.0.proj.*"),
        row("transformer_blocks.*.ff.net.2.weight"),
        replicate("transformer_blocks.*.ff.net.2.bias"),
        replicate("transformer_blocks.*.scale_shift_table"),
        gather("time_embed.*.weight"),
        replicate("time_embed.*.bias"),
        gather("caption_projection.*.weight"),
        replicate("caption_projection.*.bias"),
        gather("proj_in.weight"),
        replicate("proj_in.bias"),
        gather("proj_out.weight"),
        replicate("proj_out.bias"),
        replicate("scale_shift_table"),
    ),
)


def settings_inputs(settings: GenerationSettings) -> dict[str, torch.Tensor]:
    """The frame rate, because positions in time are seconds."""
    return {"frame_rate": torch.tensor([[float(settings.fps)]])}


def prepare(
    module: Any,
    text: torch.Tensor,
    text_mask: torch.Tensor,
    frame_rate: torch.Tensor,
    condition: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Keys and values of every cross-attention, [layers, batch, tokens, heads, head_dim], and the mask of padding."""
    context = module.caption_projection(text.to(module.caption_projection.linear_1.weight.dtype))
    keys, values = module.transformer_blocks.map(lambda block: keys_and_values(block.attn2, context))
    return {
        "transformer_blocks.*.attn2.prompt_key": keys,
        "transformer_blocks.*.attn2.prompt_value": values,
        "text_visible": text_mask.squeeze(-1) > 0,
        "frame_rate": frame_rate[:1].float(),  # of all rows, which are of one video
        **({} if condition is None else {"condition": condition}),
    }


_KEYS = dict.fromkeys(("prompt_key", "prompt_value"), (None, "dp", None, "tp"))
PROMPT_AXES = {
    **{f"transformer_blocks.*.attn2.{name}": axes for name, axes in _KEYS.items()},
    "text_visible": ("dp",),
    "condition": ("dp",),
}


def token_grid(config: Config, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """A token for each latent: `_build_transformer` refuses larger patches."""
    return sizes


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    text_visible: torch.Tensor,
    frame_rate: torch.Tensor,
    condition: torch.Tensor | None = None,
) -> torch.Tensor:
    """The velocity: diffusers' forward on the latents as tokens and the outputs of `prepare`.

    With an image, the first latent frame is the image's and has no noise: its tokens have timestep 0.
    """
    dtype, (batch, _, frames, height, width) = module.proj_in.weight.dtype, latents.shape
    if condition is not None:
        latents = replace_first_frame(latents, condition)
        timestep = torch.cat((torch.zeros_like(timestep), timestep))
    hidden = module.proj_in(latents.flatten(2).transpose(1, 2).to(dtype))
    # Of one timestep or two, whatever the number of tokens: [timesteps, 6 · features] and [timesteps, features].
    modulation, embedded = module.time_embed(timestep, batch_size=timestep.numel(), hidden_dtype=torch.float32)
    modulation, embedded = (
        expand_to_tokens(x.to(dtype), batch, frames, height * width) for x in (modulation, embedded)
    )
    rotary = rope_tables(module.rope, frame_rate, (frames, height, width), module.config.num_attention_heads)
    visible = text_visible[:, None, None]
    for block in module.transformer_blocks:
        hidden = block(hidden, None, modulation, rotary, visible)
    shift, scale = (module.scale_shift_table[None, None] + embedded[:, :, None]).unbind(dim=2)
    velocity = module.proj_out(module.norm_out(hidden) * (1 + scale) + shift)
    return velocity.reshape(batch, frames, height, width, -1).permute(0, 4, 1, 2, 3)


def rope_tables(
    rope: Any, frame_rate: torch.Tensor, sizes: tuple[int, int, int], heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, tokens, heads, head_dim / 2], different for every head.

    Tables of frames, rows and columns are computed and combined on the device, because the frame rate is an input:
    whole tables are 60 MB in float32 at 704 × 512 × 161. Angles are diffusers' own, in float32.
    """
    count, device = rope.dim // 6, frame_rate.device
    steps = np.linspace(0.0, 1.0, count, dtype=np.float32)
    rates = torch.from_numpy(np.float32(rope.theta) ** steps * np.float32(np.pi / 2)).to(device)
    frames, rows, columns = (torch.arange(size, dtype=torch.float32, device=device) for size in sizes)
    places = (
        frames * (TEMPORAL_SCALE / frame_rate.view(())) / rope.base_num_frames,
        rows * SPATIAL_SCALE / rope.base_height,
        columns * SPATIAL_SCALE / rope.base_width,
    )
    angles = [rates * (place * 2 - 1).unsqueeze(-1) for place in places]

    def table(function: Callable[[torch.Tensor], torch.Tensor], padding: float) -> torch.Tensor:
        every = join_axes(*(function(x) for x in angles))
        # Features that three does not divide are not rotated, and come first. All features are on every device of tp
        # until heads split them: split earlier, each device would need one feature of its neighbour.
        padded = constrain(F.pad(every, (rope.dim // 2 - 3 * count, 0), value=padding), None, "sp", None)
        return padded.unflatten(2, (heads, -1))

    return table(torch.cos, 1.0), table(torch.sin, 0.0)
