"""The Wan transformer: diffusers' modules with attention processors that XLA compiles well, and one step of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.bridge import rotary_attention
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.patches import PatchEmbedding
from comfy_tpu.parallel.rules import column, gather, replicate, row


class WanProcessor:
    """diffusers' attention processor without its strided writes, and with the prompt's keys and values given.

    `out[..., 0::2] = …` touches the whole tensor: 3.47 s a forward of the 14B at 480p on one H200 while it was a
    scatter, 2.71 s without.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if encoder_hidden_states is None:
            assert rotary_emb is not None
            cosine, sine = rotary_emb  # they hold every value twice
            projections = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
            out = rotary_attention(
                projections, (attn.norm_q, attn.norm_k), (cosine[..., 0::2], sine[..., 1::2]), heads=attn.heads
            )
        else:
            out = self._attend_to_prompt(attn, hidden_states, encoder_hidden_states, attention_mask)
        return attn.to_out[1](attn.to_out[0](out.type_as(hidden_states)))

    def _attend_to_prompt(
        self, attn: Any, hidden_states: torch.Tensor, prompt: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        given = (attn.prompt_key, attn.prompt_value)
        key, value = keys_and_values(attn, prompt) if attn.prompt_key is None else given
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        bias = mask if attn.prompt_bias is None else attn.prompt_bias
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        if attn.image_key is not None:  # what the model sees of a given image
            seen = (x.transpose(1, 2) for x in (attn.image_key, attn.image_value))
            out = out + F.scaled_dot_product_attention(query, *seen)
        return out.transpose(1, 2).flatten(2, 3)


def keys_and_values(attn: Any, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens, heads, head_dim] each."""
    key = attn.norm_k(attn.to_k(context)).unflatten(2, (attn.heads, -1))
    return key, attn.to_v(context).unflatten(2, (attn.heads, -1))


def build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_config(dict(config))
    model.patch_embedding = PatchEmbedding.like(model.patch_embedding)
    set_processors(model.blocks)
    return model


def set_processors(blocks: Iterable[Any]) -> None:
    """Gives blocks our attention processors, and a place for keys and values that are computed once."""
    for block in blocks:
        block.attn1.processor = block.attn2.processor = WanProcessor()
        for name in ("prompt_key", "prompt_value", "prompt_bias", "image_key", "image_value"):
            block.attn2.register_buffer(name, None)


def _build_text_only(config: Mapping[str, Any]) -> torch.nn.Module:
    if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
        raise UnsupportedError(
            "the transformer takes image embeddings, but the model says that it is a text-to-video one; "
            "use the model's own model_index.json"
        )
    return build_transformer(config)


TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("WanTransformer3DModel",),
    heads="num_attention_heads",
    build=_build_text_only,
    stacks=(LayerStack("blocks"),),
    float32=("*time_embedder*", "*scale_shift_table", "*.norm[123].*"),
    # Not the keys and values of the prompt: they are computed once.
    quantized=("blocks.*.attn1.to_*", "blocks.*.attn2.to_q", "blocks.*.attn2.to_out.0", "blocks.*.ffn.net.*"),
    rules=(
        column("blocks.*.attn[12].to_[qkv].*"),
        column("blocks.*.attn[12].norm_[qk].weight"),  # over all heads at once, so it follows the columns
        row("blocks.*.attn[12].to_out.0.weight"),
        replicate("blocks.*.attn[12].to_out.0.bias"),
        column("blocks.*.ffn.net.0.proj.*"),
        row("blocks.*.ffn.net.2.weight"),
        replicate("blocks.*.ffn.net.2.bias"),
        replicate("blocks.*.norm2.*"),
        replicate("blocks.*.scale_shift_table"),
        gather("condition_embedder.*.weight"),
        replicate("condition_embedder.*.bias"),
        gather("patch_embedding.weight"),
        replicate("patch_embedding.bias"),
        gather("proj_out.weight"),
        replicate("proj_out.bias"),
        replicate("scale_shift_table"),
    ),
)


def prompt_cache(
    module: Any, text: torch.Tensor, padding_count: torch.Tensor | None = None, *, blocks: str = "blocks"
) -> dict[str, torch.Tensor]:
    """Keys and values of every cross-attention, which no step changes: [layers, batch, tokens, heads, head_dim]. With
    `padding_count`, also what is added to scores, [layers, batch, 1, 1, tokens]. `blocks`: the list of the layers."""
    layers = getattr(module, blocks)
    dtype = layers.template.attn2.to_k.weight.dtype
    context = module.condition_embedder.text_embedder(text.to(dtype))
    keys, values = layers.map(lambda block: keys_and_values(block.attn2, context))
    prepared = {f"{blocks}.*.attn2.prompt_key": keys, f"{blocks}.*.attn2.prompt_value": values}
    if padding_count is not None:
        bias = F.pad(padding_count.log()[:, None], (text.shape[1] - 1, 0))[:, None, None].to(dtype)
        prepared[f"{blocks}.*.attn2.prompt_bias"] = bias.expand(keys.shape[0], *bias.shape)
    return prepared


PROMPT_AXES = dict.fromkeys(("blocks.*.attn2.prompt_key", "blocks.*.attn2.prompt_value"), (None, "dp", None, "tp"))


def token_grid(config: Config, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    frames, rows, columns = (
        size // patch for size, patch in zip(sizes, config.get("patch_size", (1, 2, 2)), strict=True)
    )
    return frames, rows, columns


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What the blocks of a transformer read, for models whose blocks run in another order than Wan's own."""

    hidden: torch.Tensor
    """Tokens [batch, tokens, features]."""
    rotary: tuple[torch.Tensor, torch.Tensor]
    modulation: torch.Tensor
    """[batch, 6, features]"""
    time: torch.Tensor
    text: torch.Tensor
    """Of no use: the real one is in the prompt cache."""
    grid: tuple[int, ...]
    """Batch, frames, rows and columns of the tokens."""


def begin_step(module: Any, channels: torch.Tensor, timestep: torch.Tensor) -> StepInputs:
    """The tokens of noise and of the channels beside it, and the time, before the first block."""
    batch, dtype = channels.shape[0], module.blocks.template.attn2.to_k.weight.dtype
    channels = channels.to(dtype)
    unused_text = torch.zeros(batch, 1, module.config.text_dim, dtype=dtype, device=channels.device)
    time, modulation, text, _ = module.condition_embedder(timestep.expand(batch), unused_text, None)
    return StepInputs(
        module.patch_embedding(channels).flatten(2).transpose(1, 2),
        module.rope(channels),
        modulation.unflatten(1, (6, -1)),
        time,
        text,
        (batch, *token_grid(module.config, (channels.shape[2], channels.shape[3], channels.shape[4]))),
    )


def end_step(module: Any, hidden: torch.Tensor, step: StepInputs) -> torch.Tensor:
    """The velocity from the tokens behind the last block."""
    shift, scale = (module.scale_shift_table + step.time.unsqueeze(1)).chunk(2, dim=1)
    hidden = (module.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden)
    patches = module.proj_out(hidden).reshape(*step.grid, *module.config.patch_size, -1)
    return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def predict(module: Any, latents: torch.Tensor, timestep: torch.Tensor, guidance_scale: torch.Tensor) -> torch.Tensor:
    batch, dtype = latents.shape[0], module.blocks.template.attn2.to_k.weight.dtype
    # The forward wants a text to embed; the real one is in the prompt cache already.
    unused_text = torch.zeros(batch, 1, module.config.text_dim, dtype=dtype, device=latents.device)
    # One timestep for all tokens, or one for each.
    timestep = timestep.expand(batch) if timestep.numel() == 1 else timestep.expand(batch, -1)
    return module(latents.to(dtype), timestep, unused_text, return_dict=False)[0]
