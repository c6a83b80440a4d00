"""The LTX-2 transformer: diffusers' modules with processors that XLA compiles well, and one step of it.

Two streams of tokens, those of the video and those of its sound, go through every block: each attends to itself, to the
prompt, and to the other. Branches of guidance are rows of one batch: one may have its self-attention taken out of a
block, another the attention between the streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from comfy_tpu.bridge import constrain, rotate_pairs, video_attention
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.ltx2.card import refuse_newer
from comfy_tpu.families.shared.first_frame import expand_to_tokens, replace_first_frame
from comfy_tpu.families.shared.packed_sound import join_sound, split_sound
from comfy_tpu.families.shared.rotary import join_axes
from comfy_tpu.parallel.rules import column, gather, replicate, row

Rotary = tuple[torch.Tensor, torch.Tensor]


class StreamProcessor:
    """diffusers' attention processor of a stream to itself or to the other, with RoPE tables of half the width, by
    heads. A row of `keep` that is 0 takes the values as they are; one of `linked` that is 0 takes nothing."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: Any = None,
        key_rotary_emb: Any = None,
        perturbation_mask: Any = None,
        all_perturbed: Any = None,
    ) -> torch.Tensor:
        others = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        key, value = keys_and_values(attn, others)
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        query = rotate(attn, query, query_rotary_emb)
        key = rotate(attn, key, query_rotary_emb if key_rotary_emb is None else key_rotary_emb)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        attend = video_attention if encoder_hidden_states is None else F.scaled_dot_product_attention
        out = attend(q, k, v).transpose(1, 2).type_as(query)
        if attn.keep is not None:
            out = torch.where(attn.keep.unsqueeze(-1) > 0, out, value)
        out = _project(attn, hidden_states, out)
        return out if attn.linked is None else torch.where(attn.linked > 0, out, 0.0)


class PromptProcessor:
    """Attention to the prompt, whose keys and values are given, or are of this step where the timestep modulates
    them."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: Any = None,
        key_rotary_emb: Any = None,
    ) -> torch.Tensor:
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key, value = attn.prompt_key, attn.prompt_value
        if key is None:
            key, value = keys_and_values(attn, encoder_hidden_states)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v)
        return _project(attn, hidden_states, out.transpose(1, 2).type_as(query))


def keys_and_values(attn: Any, context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens, heads, head_dim] each."""
    key = attn.norm_k(attn.to_k(context)).unflatten(2, (attn.heads, -1))
    return key, attn.to_v(context).unflatten(2, (attn.heads, -1))


def rotate(attn: Any, x: torch.Tensor, tables: Rotary) -> torch.Tensor:
    """RoPE in float32, on neighbours or on the halves of a head, as the model was trained."""
    if attn.rope_type == "interleaved":
        return rotate_pairs(x, *tables)
    cosine, sine = tables
    first, second = x.float().unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).type_as(x)


def _project(attn: Any, hidden_states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] -> [batch, tokens, features]; a head's gate is the tokens' own."""
    if attn.to_gate_logits is not None:
        out = out * (2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))).unsqueeze(-1)
    result: torch.Tensor = attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))
    return result


_STREAM_ATTENTION = ("attn1", "audio_attn1", "audio_to_video_attn", "video_to_audio_attn")
_PROMPT_ATTENTION = ("attn2", "audio_attn2")
_BUFFERS = {
    **dict.fromkeys(_STREAM_ATTENTION, ("keep", "linked")),
    **dict.fromkeys(_PROMPT_ATTENTION, ("prompt_key", "prompt_value")),
}


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import LTX2VideoTransformer3DModel

    _refuse_unsupported(config)
    model = LTX2VideoTransformer3DModel.from_config(dict(config))
    for block in model.transformer_blocks:
        for name, buffers in _BUFFERS.items():
            attention = getattr(block, name)
            attention.processor = StreamProcessor() if name in _STREAM_ATTENTION else PromptProcessor()
            for buffer in buffers:
                attention.register_buffer(buffer, None)
    return model


_TIMES = {"causal_offset": 1, "audio_scale_factor": 4, "audio_sampling_rate": 16000, "audio_hop_length": 160}
"""What places in time depend on; `guidance.settings_inputs` counts with these."""


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    names = ("patch_size_t", "patch_size", "audio_patch_size_t", "audio_patch_size")
    if any(config.get(name, 1) != 1 for name in names):
        patches = ", ".join(f"{name}={config.get(name, 1)}" for name in names)
        raise UnsupportedError(
            f"the transformer takes patches of several latents ({patches}), and every LTX-2 that was published takes "
            "single ones; use one of those"
        )
    for one, other in (("in_channels", "audio_in_channels"), ("num_attention_heads", "audio_num_attention_heads")):
        if config.get(one, 128) != config.get(other, 128):
            raise UnsupportedError(
                f"the transformer has {one}={config.get(one)} and {other}={config.get(other)}, and every LTX-2 that "
                "was published has as many of both; use one of those"
            )
    for name, value in _TIMES.items():
        if config.get(name, value) != value:
            raise UnsupportedError(
                f"the transformer has {name}={config[name]}, and every LTX-2 that was published {value}; use one of "
                "those"
            )
    if reason := refuse_newer(config):
        raise UnsupportedError(reason)


_RULES = (
    column("transformer_blocks.*attn*.to_[qkvg]*"),  # and the gates of the heads, where they have any
    column("transformer_blocks.*attn*.norm_[qk].weight"),  # over all heads at once, so it follows the columns
    row("transformer_blocks.*attn*.to_out.0.weight"),
    replicate("transformer_blocks.*attn*.to_out.0.bias"),
    column("transformer_blocks.*ff.net.0.proj.*"),
    row("transformer_blocks.*ff.net.2.weight"),
    replicate("transformer_blocks.*ff.net.2.bias"),
    replicate("transformer_blocks.*scale_shift_table"),
    gather("*time_embed.*.weight"),
    replicate("*time_embed.*.bias"),
    gather("av_cross_attn_*.weight"),
    replicate("av_cross_attn_*.bias"),
    gather("*proj_in.weight"),
    replicate("*proj_in.bias"),
    gather("*proj_out.weight"),
    replicate("*proj_out.bias"),
    replicate("scale_shift_table"),
    replicate("audio_scale_shift_table"),
)

TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("LTX2VideoTransformer3DModel",),
    heads="num_attention_heads",
    build=_build_transformer,
    stacks=(LayerStack("transformer_blocks", carry=("hidden_states", "audio_hidden_states")),),
    float32=("*time_embed.*", "av_cross_attn_*", "*prompt_adaln.*"),
    # Not the keys and values of the prompt: they are computed once.
    quantized=(
        "transformer_blocks.*.attn1.to_[qkvo]*",
        "transformer_blocks.*.attn2.to_q",
        "transformer_blocks.*.attn2.to_out.0",
        "transformer_blocks.*.ff.net.*",
    ),
    rules=(*_RULES, gather("*caption_projection.*.weight"), replicate("*caption_projection.*.bias")),
)
MODULATED_TRANSFORMER = dataclasses.replace(
    TRANSFORMER, rules=(*_RULES, gather("*prompt_adaln.*.weight"), replicate("*prompt_adaln.*.bias"))
)
"""That of LTX-2.3, where the timestep modulates the prompt, which the text connectors have projected."""


def prepare(
    module: Any,
    text: torch.Tensor,
    audio_text: torch.Tensor,
    frame_times: torch.Tensor,
    sound_times: torch.Tensor,
    perturbed: torch.Tensor | None = None,
    perturbed_block: torch.Tensor | None = None,
    isolated: torch.Tensor | None = None,
    condition: torch.Tensor | None = None,
    **guidance: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Keys and values of every attention to the prompt, [layers, batch, tokens, heads, head_dim], or the prompt itself
    where a timestep modulates it; and what is taken out of which rows."""
    dtype = module.proj_in.weight.dtype
    video_context, audio_context = text.to(dtype), audio_text.to(dtype)
    if module.config.use_prompt_embeddings:
        video_context = module.caption_projection(video_context)
        audio_context = module.audio_caption_projection(audio_context)
    prepared = {
        "frame_times": frame_times[:1].float(),  # of all rows, which are of one video
        "sound_times": sound_times[:1].float(),
        **({} if condition is None else {"condition": condition}),
        **guidance,
    }
    if module.prompt_modulation:
        prepared |= {"text": video_context, "audio_text": audio_context}
    else:
        for name, context in (("attn2", video_context), ("audio_attn2", audio_context)):
            keys, values = module.transformer_blocks.map(
                lambda block, name=name, context=context: keys_and_values(getattr(block, name), context)
            )
            prepared |= {
                f"transformer_blocks.*.{name}.prompt_key": keys,
                f"transformer_blocks.*.{name}.prompt_value": values,
            }
    layers = torch.arange(module.config.num_layers, device=text.device)
    if perturbed is not None and perturbed_block is not None:
        taken = (layers == perturbed_block[0, 0]).view(-1, 1, 1, 1) & (perturbed > 0).view(1, -1, 1, 1)
        keep = 1.0 - taken.float()
        prepared |= {f"transformer_blocks.*.{name}.keep": keep for name in ("attn1", "audio_attn1")}
    if isolated is not None:
        linked = (1.0 - isolated.float()).view(1, -1, 1, 1).expand(len(layers), -1, -1, -1)
        names = ("audio_to_video_attn", "video_to_audio_attn")
        prepared |= {f"transformer_blocks.*.{name}.linked": linked for name in names}
    return prepared


_KEYS = dict.fromkeys(("prompt_key", "prompt_value"), (None, "dp", None, "tp"))
PREPARED_AXES = {
    **{f"transformer_blocks.*.{attn}.{name}": axes for attn in _PROMPT_ATTENTION for name, axes in _KEYS.items()},
    **{
        f"transformer_blocks.*.{attn}.{name}": (None, "dp") for attn in _STREAM_ATTENTION for name in ("keep", "linked")
    },
    "text": ("dp",),
    "audio_text": ("dp",),
    "condition": ("dp",),
}


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    frame_times: torch.Tensor,
    sound_times: torch.Tensor,
    text: torch.Tensor | None = None,
    audio_text: torch.Tensor | None = None,
    condition: torch.Tensor | None = None,
    **guidance: torch.Tensor,
) -> torch.Tensor:
    """The velocity: diffusers' forward on the latents as tokens and the outputs of `prepare`.

    With an image, the first latent frame is the image's and has no noise: its tokens have timestep 0.
    """
    config, dtype = module.config, module.proj_in.weight.dtype
    video, sound = split_sound(latents, frame_times.shape[1], sound_times.shape[1])
    batch, _, frames, height, width = video.shape
    video_timestep = timestep
    if condition is not None:
        video = replace_first_frame(video, condition)
        video_timestep = torch.cat((torch.zeros_like(timestep), timestep))
    hidden = module.proj_in(video.flatten(2).transpose(1, 2).to(dtype))
    audio_hidden = module.audio_proj_in(sound.to(dtype))

    def embed(layer: Any, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, 1 or tokens, features]: of one timestep or two, whatever the number of tokens."""
        modulation, embedded = layer(timesteps, batch_size=timesteps.numel(), hidden_dtype=torch.float32)
        made = [expand_to_tokens(x.to(dtype), batch, frames, height * width) for x in (modulation, embedded)]
        return made[0], made[1]

    modulation, embedded = embed(module.time_embed, video_timestep)
    audio_modulation, audio_embedded = embed(module.audio_time_embed, timestep)
    gate_timestep = timestep * (config.cross_attn_timestep_scale_multiplier / config.timestep_scale_multiplier)
    prompt_modulation: dict[str, torch.Tensor] = {}
    if module.prompt_modulation:
        prompt_modulation = {
            "temb_prompt": embed(module.prompt_adaln, timestep)[0],
            "temb_prompt_audio": embed(module.audio_prompt_adaln, timestep)[0],
        }
    heads = config.num_attention_heads
    in_time, in_sound = frame_times[0], sound_times[0]
    shape = (frames, height, width)
    for block in module.transformer_blocks:
        hidden, audio_hidden = block(
            hidden_states=hidden,
            audio_hidden_states=audio_hidden,
            encoder_hidden_states=text,
            audio_encoder_hidden_states=audio_text,
            temb=modulation,
            temb_audio=audio_modulation,
            temb_ca_scale_shift=embed(module.av_cross_attn_video_scale_shift, timestep)[0],
            temb_ca_audio_scale_shift=embed(module.av_cross_attn_audio_scale_shift, timestep)[0],
            temb_ca_gate=embed(module.av_cross_attn_video_a2v_gate, gate_timestep)[0],
            temb_ca_audio_gate=embed(module.av_cross_attn_audio_v2a_gate, gate_timestep)[0],
            **prompt_modulation,
            video_rotary_emb=_video_tables(module.rope, in_time, shape, heads),
            audio_rotary_emb=_time_tables(module.audio_rope, in_sound, heads),
            ca_video_rotary_emb=_time_tables(module.cross_attn_rope, in_time, heads, repeats=height * width),
            ca_audio_rotary_emb=_time_tables(module.cross_attn_audio_rope, in_sound, heads),
        )
    audio_velocity = _finish(module.audio_scale_shift_table, module.audio_norm_out(audio_hidden), audio_embedded)
    audio_velocity = module.audio_proj_out(audio_velocity)
    velocity = module.proj_out(_finish(module.scale_shift_table, module.norm_out(hidden), embedded))
    return join_sound(velocity.reshape(batch, frames, height, width, -1).permute(0, 4, 1, 2, 3), audio_velocity)


def _finish(table: torch.Tensor, normed: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    shift, scale = (table[None, None] + embedded[:, :, None]).unbind(dim=2)
    return normed * (1 + scale) + shift


def _rates(rope: Any, axes: int, device: torch.device) -> torch.Tensor:
    count = rope.dim // (2 * axes)
    steps = np.linspace(0.0, 1.0, count, dtype=np.float64 if rope.double_precision else np.float32)
    return torch.from_numpy((rope.theta**steps * np.pi / 2).astype(np.float32)).to(device)


def _video_tables(rope: Any, times: torch.Tensor, sizes: tuple[int, int, int], heads: int) -> Rotary:
    """Cosines and sines [1, tokens, heads, head_dim / 2], different for every head.

    Tables of frames, rows and columns are computed and combined on the device: whole tables are 50 MB in float32 at
    768 × 512 × 121. Angles are diffusers' own, in float32.
    """
    _, height, width = sizes
    down, across = (
        (torch.arange(size, dtype=torch.float32, device=times.device) + 0.5) * scale / base
        for size, scale, base in (
            (height, rope.scale_factors[1], rope.base_height),
            (width, rope.scale_factors[2], rope.base_width),
        )
    )
    rates = _rates(rope, 3, times.device)
    angles = [(place * 2 - 1).unsqueeze(-1) * rates for place in (times / rope.base_num_frames, down, across)]

    def table(function: Callable[[torch.Tensor], torch.Tensor], padding: float) -> torch.Tensor:
        return _by_heads(join_axes(*(function(x) for x in angles)), rope.dim // 2, heads, padding)

    return table(torch.cos, 1.0), table(torch.sin, 0.0)


def _time_tables(rope: Any, times: torch.Tensor, heads: int, repeats: int = 1) -> Rotary:
    """Tables of places in time alone, each of `repeats` tokens."""
    rates = _rates(rope, 1, times.device)
    angles = (times / rope.base_num_frames * 2 - 1).unsqueeze(-1) * rates

    def table(function: Callable[[torch.Tensor], torch.Tensor], padding: float) -> torch.Tensor:
        every = function(angles).unsqueeze(1).expand(-1, repeats, -1).reshape(1, angles.shape[0] * repeats, -1)
        return _by_heads(every, rope.dim // 2, heads, padding)

    return table(torch.cos, 1.0), table(torch.sin, 0.0)


def _by_heads(table: torch.Tensor, features: int, heads: int, padding: float) -> torch.Tensor:
    # Features that the axes do not divide are not rotated, and come first. All features are on every device of tp until
    # heads split them: split earlier, each device would need one feature of its neighbour.
    padded = F.pad(table, (features - table.shape[-1], 0), value=padding)
    return constrain(padded, None, "sp", None).unflatten(2, (heads, -1))
