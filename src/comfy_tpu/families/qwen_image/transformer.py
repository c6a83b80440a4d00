"""The Qwen-Image transformer: diffusers' modules with static shapes, and one step of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from comfy_tpu.bridge import constrain, joint_attention, rotate_pairs, round_to
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.model_family import GuidanceInputs
from comfy_tpu.families.shared.modulation import Modulation
from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.parallel.rules import column, gather, replicate, row

Rotary = tuple[torch.Tensor, torch.Tensor]


class DoubleStreamProcessor:
    """diffusers' attention processor with separate streams, and without its mask of keys.

    Real tokens of a text come before its padding, and the text behind the image: `encoder_hidden_states_mask` is the
    number of keys in each row. `image_rotary_emb`: cosines and sines of the image, and of the text.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor,
        image_rotary_emb: tuple[Rotary, Rotary],
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(2, (attn.heads, -1))

        of_image, of_text = image_rotary_emb
        image = (
            rotate_pairs(attn.norm_q(heads(attn.to_q(hidden_states))), *of_image),
            rotate_pairs(attn.norm_k(heads(attn.to_k(hidden_states))), *of_image),
            heads(attn.to_v(hidden_states)),
        )
        text = (
            rotate_pairs(attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states))), *of_text),
            rotate_pairs(attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states))), *of_text),
            heads(attn.add_v_proj(encoder_hidden_states)),
        )
        seen, read = joint_attention(_heads_first(image), _heads_first(text), encoder_hidden_states_mask)
        return (
            attn.to_out[1](attn.to_out[0](_merge_heads(seen, hidden_states))),
            attn.to_add_out(_merge_heads(read, encoder_hidden_states)),
        )


def _heads_first(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (part.transpose(1, 2) for part in parts)
    return query, key, value


def _merge_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2, 3).type_as(like)


class TwoTimesBlock(torch.nn.Module):
    """diffusers' block of a model with `zero_cond_t`: tokens of given images are modulated for timestep 0.

    The names of weights are the same. diffusers has both timesteps as rows of one batch, which dp would split between
    them; here `temb` is [batch, 2, features], and `modulate_index` [tokens, 1] is true for tokens of given images.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.img_mod, self.img_mlp = block.img_mod, block.img_mlp
        self.txt_mod, self.txt_mlp = block.txt_mod, block.txt_mlp
        self.img_norm1, self.img_norm2 = block.img_norm1, block.img_norm2
        self.txt_norm1, self.txt_norm2 = block.txt_norm1, block.txt_norm2
        self.attn = block.attn

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[Rotary, Rotary],
        modulate_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.img_mod(temb)
        image = torch.where(modulate_index, both[:, 1:], both[:, :1]).chunk(6, dim=-1)
        text = self.txt_mod(temb[:, :1]).chunk(6, dim=-1)
        seen, read = self.attn(
            hidden_states=_modulate(self.img_norm1(hidden_states), image[:2]),
            encoder_hidden_states=_modulate(self.txt_norm1(encoder_hidden_states), text[:2]),
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
        )
        hidden_states = hidden_states + image[2] * seen
        encoder_hidden_states = encoder_hidden_states + text[2] * read
        image_mlp = self.img_mlp(_modulate(self.img_norm2(hidden_states), image[3:5]))
        text_mlp = self.txt_mlp(_modulate(self.txt_norm2(encoder_hidden_states), text[3:5]))
        return encoder_hidden_states + text[5] * text_mlp, hidden_states + image[5] * image_mlp


def _modulate(x: torch.Tensor, shift_and_scale: Sequence[torch.Tensor]) -> torch.Tensor:
    shift, scale = shift_and_scale
    return x * (1 + scale) + shift


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import QwenImageTransformer2DModel

    if other := [name for name in ("use_additional_t_cond", "use_layer3d_rope", "guidance_embeds") if config.get(name)]:
        raise UnsupportedError(
            f"the transformer has {other[0]}, as Qwen-Image-Layered or a distilled model does; use Qwen-Image, "
            "Qwen-Image-Edit or one of their later versions"
        )
    model: Any = QwenImageTransformer2DModel.from_config(dict(config))
    for index, block in enumerate(model.transformer_blocks):
        block.attn.processor = DoubleStreamProcessor()
        for part in (block.img_mod, block.txt_mod):
            part[1] = Modulation(part[1].in_features, part[1].out_features)
        if model.zero_cond_t:
            model.transformer_blocks[index] = TwoTimesBlock(block)
    built: torch.nn.Module = model
    return built


TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("QwenImageTransformer2DModel",),
    heads="num_attention_heads",
    build=_build_transformer,
    stacks=(LayerStack("transformer_blocks", carry=("encoder_hidden_states", "hidden_states")),),
    float32=("time_text_embed.*",),
    quantized=(
        "transformer_blocks.*.attn.to_*",
        "transformer_blocks.*.attn.add_[qkv]_proj",
        "transformer_blocks.*_mlp.net.*",
    ),
    rules=(
        column("transformer_blocks.*_mod.1.*"),
        column("transformer_blocks.*.attn.to_[qkv].*"),
        column("transformer_blocks.*.attn.add_[qkv]_proj.*"),
        row("transformer_blocks.*.attn.to_out.0.weight"),
        replicate("transformer_blocks.*.attn.to_out.0.bias"),
        row("transformer_blocks.*.attn.to_add_out.weight"),
        replicate("transformer_blocks.*.attn.to_add_out.bias"),
        replicate("transformer_blocks.*.attn.norm_*.weight"),  # over one head, so every device has all of it
        column("transformer_blocks.*_mlp.net.0.proj.*"),
        row("transformer_blocks.*_mlp.net.2.weight"),
        replicate("transformer_blocks.*_mlp.net.2.bias"),
        gather("time_text_embed.*.weight"),
        replicate("time_text_embed.*.bias"),
        replicate("txt_norm.weight"),
        gather("txt_in.weight"),
        replicate("txt_in.bias"),
        gather("img_in.weight"),
        replicate("img_in.bias"),
        gather("norm_out.linear.weight"),
        replicate("norm_out.linear.bias"),
        gather("proj_out.weight"),
        replicate("proj_out.bias"),
    ),
)


def prepare(module: Any, text: torch.Tensor, **references: torch.Tensor) -> dict[str, torch.Tensor]:
    """The embedded prompt, the number of its tokens, and given images as tokens: the same for all steps.

    `text` is zeros behind the prompt.
    """
    text = text.to(module.txt_in.weight.dtype)
    count = (text != 0).any(dim=-1).int().sum(dim=1)
    embedded = {"text": module.txt_in(module.txt_norm(text)), "text_count": count}
    # As a grid, of which a step needs the sides: [batch, rows, columns, channels].
    return embedded | {name: as_tokens(x).unflatten(1, (x.shape[3] // 2, -1)) for name, x in references.items()}


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    text: torch.Tensor,
    text_count: torch.Tensor,
    **references: torch.Tensor,
) -> torch.Tensor:
    """The velocity: diffusers' forward with static shapes, on the outputs of `prepare`."""
    batch, _, _, height, width = latents.shape
    dtype, given = module.img_in.weight.dtype, [references[name] for name in sorted(references)]
    grids = [(height // 2, width // 2), *((image.shape[1], image.shape[2]) for image in given)]
    count = grids[0][0] * grids[0][1]
    # Joined whole on every device, and split over sp afterwards: 64 numbers for a token cost nothing to join.
    tokens = torch.cat((as_tokens(latents), *(image.flatten(1, 2).to(latents.dtype) for image in given)), dim=1)
    tokens = constrain(tokens.to(dtype), "dp", None, None)
    hidden = module.img_in(constrain(tokens, "dp", "sp", None))

    share = round_to(round_to(timestep, dtype) / 1000, dtype).expand(batch)
    arguments: dict[str, torch.Tensor] = {}
    condition = _embed_time(module.time_text_embed, share, dtype)
    if module.zero_cond_t:
        blocks_condition = torch.stack((condition, _embed_time(module.time_text_embed, 0 * share, dtype)), dim=1)
        arguments["modulate_index"] = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(1) >= count
    else:
        blocks_condition = condition
    rotary = rope_tables(module.pos_embed, text.shape[1], grids, latents.device)
    for block in module.transformer_blocks:
        text, hidden = block(
            hidden_states=hidden,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=text_count + hidden.shape[1],
            temb=blocks_condition,
            image_rotary_emb=rotary,
            **arguments,
        )
    made = module.proj_out(module.norm_out(hidden, condition))
    # Gathered as 64 numbers of bfloat16 for a token, before guidance takes norms of them in float32.
    made = constrain(made, "dp", None, None, name="prediction")
    return as_latents(made[:, :count], height, width)


def _embed_time(embed: Any, share: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    embedded: torch.Tensor = embed.timestep_embedder(embed.time_proj(share)).to(dtype)
    return embedded


def guide(velocities: Sequence[torch.Tensor], given: GuidanceInputs) -> torch.Tensor:
    """Qwen-Image's guidance: as usual, with the norm of the prompt's own velocity for each token."""
    height, width = velocities[0].shape[3:]
    # Whole on every device before their norms are taken, as they are afterwards anyway.
    own, other = (as_tokens(constrain(x, None, None, None, None, None)) for x in velocities)
    guided = other + given.scale * (own - other)
    return as_latents(guided * (_norm(own) / _norm(guided)), height, width)


def _norm(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.square().sum(dim=-1, keepdim=True).sqrt()


def rope_tables(
    positions: Any, text_tokens: int, grids: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Rotary, Rotary]:
    """Cosines and sines [1, tokens, 1, head_dim / 2], of the images and of the text.

    The generated image is at 0 in time, given ones at 1, 2 and so on; rows and columns are counted from the middle. The
    text stands behind the largest side, at the same place on all three axes.
    """
    sizes = positions.axes_dim
    behind = max(side // 2 for grid in grids for side in grid)

    def table(function: Callable[[np.ndarray], np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        def axis(number: int, places: np.ndarray) -> torch.Tensor:
            angles = _angles(positions.theta, sizes[number], places)
            return torch.from_numpy(function(angles.astype(np.float64)).astype(np.float32)).to(device)

        def image(number: int, rows: int, columns: int) -> torch.Tensor:
            down, across = (axis(1 + n, np.arange(side) - (side - side // 2)) for n, side in enumerate((rows, columns)))
            axes = (
                axis(0, np.array([number])).view(1, 1, -1).expand(rows, columns, -1),
                down.unsqueeze(1).expand(-1, columns, -1),
                across.unsqueeze(0).expand(rows, -1, -1),
            )
            return torch.cat(axes, dim=-1).flatten(0, 1)

        # Whole on every device, as the tokens are before they are split.
        images = constrain(torch.cat([image(number, *grid) for number, grid in enumerate(grids)]), None, None)
        text = torch.cat([axis(number, behind + np.arange(text_tokens)) for number in range(3)], dim=-1)
        return images[None, :, None], text[None, :, None]

    (image_cosine, text_cosine), (image_sine, text_sine) = table(np.cos), table(np.sin)
    return (image_cosine, image_sine), (text_cosine, text_sine)


def _angles(theta: float, size: int, places: np.ndarray) -> np.ndarray:
    """[places, pairs], in float32 as in diffusers: place 500 differs by 1e-5 from the exact one."""
    powers = np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
    return np.outer(places.astype(np.float32), np.float32(1.0) / powers)
