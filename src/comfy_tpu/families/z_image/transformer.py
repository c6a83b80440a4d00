"""The Z-Image transformer: diffusers' modules with static shapes, and one step of it.

A prompt is padded in two ways. Up to a multiple of 32 tokens it is padded with a learned token, which the image attends
to; from there to the longest prompt that the program takes, with tokens that nothing sees. The image stands behind the
prompt, at a place in time that depends on the number of the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain, rotate_pairs
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.model_family import GuidanceInputs
from comfy_tpu.families.shared.joint_streams import concat_streams, split_streams
from comfy_tpu.families.shared.modulation import Modulation
from comfy_tpu.parallel.rules import column, gather, replicate, row

MULTIPLE = 32
"""Sequences are padded with learned tokens to a multiple of this."""
_PATCH = 2
_KEY = "2-1"
"""The embedding and the last layer for patches of 2 × 2 latents of one frame, which all published models have alone."""

Rotary = tuple[torch.Tensor, torch.Tensor]


class SingleStreamProcessor:
    """diffusers' attention processor with real RoPE tables of half the width: `freqs_cis` is cosines and sines,
    [1 or batch, tokens, 1, head_dim / 2]."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: Rotary | None = None,
    ) -> torch.Tensor:
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        if attn.norm_q is not None:
            query, key = attn.norm_q(query), attn.norm_k(key)
        if freqs_cis is not None:
            query, key = rotate_pairs(query, *freqs_cis), rotate_pairs(key, *freqs_cis)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        result: torch.Tensor = attn.to_out[0](out.transpose(1, 2).flatten(2, 3).type_as(hidden_states))
        return result


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import ZImageTransformer2DModel

    if config.get("siglip_feat_dim") is not None:
        raise UnsupportedError(
            "the transformer reads images beside the prompt (siglip_feat_dim), as Z-Image Omni does; use Z-Image or "
            "Z-Image Turbo"
        )
    model: Any = ZImageTransformer2DModel.from_config(dict(config))
    if _KEY not in model.all_x_embedder:
        raise UnsupportedError(
            f"the transformer has patches of {', '.join(model.all_x_embedder)} (side-frames), expected {_KEY}; use a "
            "published Z-Image"
        )
    for block in (*model.layers, *model.noise_refiner, *model.context_refiner):
        block.attention.processor = SingleStreamProcessor()
        if block.modulation:
            linear = block.adaLN_modulation[0]
            block.adaLN_modulation[0] = Modulation(linear.in_features, linear.out_features)
    built: torch.nn.Module = model
    return built


def _stack(path: str) -> LayerStack:
    return LayerStack(path, carry=("x",), varying=("layer_id",))


TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("ZImageTransformer2DModel",),
    heads="n_heads",
    build=_build_transformer,
    stacks=(_stack("layers"), _stack("noise_refiner"), _stack("context_refiner")),
    float32=("t_embedder.*",),
    quantized=("layers.*.attention.to_*", "layers.*.feed_forward.w*"),
    rules=(
        column("*.attention.to_[qkv].weight"),
        row("*.attention.to_out.0.weight"),
        replicate("*.attention.norm_[qk].weight"),  # over one head, so every device has all of it
        column("*.feed_forward.w[13].weight"),
        row("*.feed_forward.w2.weight"),
        replicate("*.attention_norm[12].weight"),
        replicate("*.ffn_norm[12].weight"),
        column("layers.*.adaLN_modulation.0.*"),
        column("noise_refiner.*.adaLN_modulation.0.*"),
        gather("t_embedder.*.weight"),
        replicate("t_embedder.*.bias"),
        replicate("cap_embedder.0.weight"),
        gather("cap_embedder.1.weight"),
        replicate("cap_embedder.1.bias"),
        gather("all_x_embedder.*.weight"),
        replicate("all_x_embedder.*.bias"),
        gather("all_final_layer.*.weight"),
        replicate("all_final_layer.*.bias"),
        replicate("*_pad_token"),
    ),
)


def settings_inputs(settings: GenerationSettings) -> dict[str, torch.Tensor]:
    return {"cfg_normalization": torch.full((1, 1), settings.cfg_normalization)}


def prepare(module: Any, text: torch.Tensor, cfg_normalization: torch.Tensor) -> dict[str, torch.Tensor]:
    """The refined prompt, the number of its tokens, and the image's place in time: the same for all steps.

    `text` is zeros behind the prompt.
    """
    embedder, config = module.cap_embedder, module.config
    text = F.pad(text, (0, 0, 0, -text.shape[1] % MULTIPLE)).to(embedder[1].weight.dtype)
    count = (text != 0).any(dim=-1).int().sum(dim=1)
    padded = (count + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    tokens = torch.arange(text.shape[1], device=text.device)
    hidden = torch.where((tokens < count.unsqueeze(1)).unsqueeze(-1), embedder(text), module.cap_pad_token)
    visible = (tokens < padded.unsqueeze(1))[:, None, None]
    rotary = _text_rope(config, text.shape[1], text.device)
    for layer in module.context_refiner:
        hidden = layer(x=hidden, attn_mask=visible, freqs_cis=rotary)
    # One row of a table by a sum: a gather may move the table, and a product would round it.
    places = np.arange(0, text.shape[1] + 1, MULTIPLE)
    chosen = (padded.unsqueeze(1) == torch.from_numpy(places).to(text.device)).unsqueeze(-1)
    cosine, sine = (
        torch.where(chosen, table, 0.0).sum(dim=1) for table in _axis_tables(config, 0, places + 1, text.device)
    )
    return {
        "text": hidden,
        "text_count": padded,
        "time_cosine": cosine,
        "time_sine": sine,
        "cfg_normalization": cfg_normalization[:1],  # one row, which dp does not split
    }


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    text: torch.Tensor,
    text_count: torch.Tensor,
    time_cosine: torch.Tensor,
    time_sine: torch.Tensor,
    cfg_normalization: torch.Tensor,
) -> torch.Tensor:
    """The velocity: diffusers' forward with static shapes, on the outputs of `prepare`."""
    dtype, config = module.all_x_embedder[_KEY].weight.dtype, module.config
    rows, columns = latents.shape[3] // _PATCH, latents.shape[4] // _PATCH
    count, padding = rows * columns, -(rows * columns) % MULTIPLE
    condition = module.t_embedder((1000 - timestep) / 1000 * config.t_scale).to(dtype).expand(latents.shape[0], -1)

    # Padded before they are split over sp: whole on every device, latents cost nothing to pad.
    patches = constrain(F.pad(as_patches(latents), (0, 0, 0, padding)).to(dtype), "dp", "sp", None)
    hidden = module.all_x_embedder[_KEY](patches)
    if padding:
        is_image = torch.arange(count + padding, device=latents.device) < count
        hidden = torch.where(is_image[:, None], hidden, module.x_pad_token)
    image_rotary = _image_rope(config, rows, columns, padding, (time_cosine, time_sine))
    for layer in module.noise_refiner:
        hidden = layer(x=hidden, attn_mask=None, freqs_cis=image_rotary, adaln_input=condition)

    text_tokens = text.shape[1]
    is_text = torch.arange(text_tokens, device=text.device) < text_count.unsqueeze(1)
    is_seen = concat_streams(is_text, torch.ones_like(is_text[:, :1]).expand(-1, count + padding))
    text_rotary = _text_rope(config, text_tokens, text.device)
    rotary = tuple(
        concat_streams(of_text.expand(of_image.shape[0], -1, -1, -1), of_image)
        for of_text, of_image in zip(text_rotary, image_rotary, strict=True)
    )
    hidden = concat_streams(text, hidden)
    for layer in module.layers:
        hidden = layer(x=hidden, attn_mask=is_seen[:, None, None], freqs_cis=rotary, adaln_input=condition)
    _, hidden = split_streams(hidden, text_tokens)
    # Gathered as 64 numbers of bfloat16 for a token, before guidance takes norms of all of them in float32.
    made = constrain(module.all_final_layer[_KEY](hidden, c=condition), "dp", None, None, name="prediction")
    return -as_image(made[:, :count], rows, columns)


def guide(velocities: Sequence[torch.Tensor], given: GuidanceInputs) -> torch.Tensor:
    """Z-Image's guidance, which starts from the prompt's own velocity; its norm may be limited."""
    # Whole on every device before their norms are taken, as they are afterwards anyway.
    positive, negative = (constrain(x, None, None, None, None, None) for x in velocities)
    guided = positive + given.scale * (positive - negative)
    limit = given.prepared["cfg_normalization"].view(1, 1, 1, 1, 1)
    most, norm = limit * _norm(positive), _norm(guided)
    return torch.where((limit > 0) & (norm > most), guided * (most / norm), guided)


def _norm(velocity: torch.Tensor) -> torch.Tensor:
    return velocity.square().sum(dim=(1, 2, 3, 4), keepdim=True).sqrt()


def as_patches(latents: torch.Tensor) -> torch.Tensor:
    """[batch, channels, 1, height, width] -> a token for each 2 × 2 latents, channels last."""
    patches = latents.squeeze(2).unflatten(3, (-1, _PATCH)).unflatten(2, (-1, _PATCH))
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def as_image(tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `as_patches`; rows and columns of tokens."""
    patches = tokens.unflatten(2, (_PATCH, _PATCH, -1)).unflatten(1, (rows, columns))
    return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3).unsqueeze(2)


def _axis_tables(config: Any, axis: int, places: np.ndarray, device: torch.device) -> Rotary:
    """Cosines and sines [places, pairs of the axis]. Angles are rounded to float32 before the cosine, as in diffusers:
    at place 500 the two differ by 3e-5."""
    size = config.axes_dims[axis]
    angles = np.outer(places.astype(np.float64), 1.0 / config.rope_theta ** (np.arange(0, size, 2) / size))
    angles = angles.astype(np.float32).astype(np.float64)

    def table(function: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(function(angles).astype(np.float32)).to(device)

    return table(np.cos), table(np.sin)


def _text_rope(config: Any, tokens: int, device: torch.device) -> Rotary:
    """[1, tokens, 1, head_dim / 2]: the text is at 1, 2, 3 and so on in time, at row and column 0."""
    others = sum(config.axes_dims[1:]) // 2
    cosine, sine = _axis_tables(config, 0, np.arange(1, tokens + 1), device)
    return F.pad(cosine, (0, others), value=1.0)[None, :, None], F.pad(sine, (0, others))[None, :, None]


def _image_rope(config: Any, rows: int, columns: int, padding: int, time: Rotary) -> Rotary:
    """[batch, tokens, 1, head_dim / 2]: the image is at one place in time, [batch, pairs], the padding at 0, 0, 0."""
    device, batch = time[0].device, time[0].shape[0]
    places = (np.arange(rows), np.arange(columns))
    down, across = (_axis_tables(config, axis, place, device) for axis, place in enumerate(places, 1))

    def combine(time: torch.Tensor, down: torch.Tensor, across: torch.Tensor, unrotated: float) -> torch.Tensor:
        axes = (
            time[:, None, None].expand(-1, rows, columns, -1),
            down[None, :, None].expand(batch, -1, columns, -1),
            across[None, None].expand(batch, rows, -1, -1),
        )
        table = torch.cat(axes, dim=-1).flatten(1, 2)
        return F.pad(table, (0, 0, 0, padding), value=unrotated).unsqueeze(2)

    return combine(time[0], down[0], across[0], 1.0), combine(time[1], down[1], across[1], 0.0)
