"""Flux.1 dev and schnell: pictures, which are videos of one frame."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from comfy_tpu.compiler.arranging import Packed, pack_features
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.building import check_whole_numbers, refuse_unknown_keys
from comfy_tpu.families.family import Cache, Config, Limits, SchedulerFactory, TextEncoder, VideoFamily
from comfy_tpu.families.flux_names import flux_names
from comfy_tpu.families.joint import JointProcessor, joined, parted, tp
from comfy_tpu.families.modulation import Modulation
from comfy_tpu.families.patches import as_latents, as_tokens
from comfy_tpu.families.schedulers import dpm, shift_by_tokens, unipc
from comfy_tpu.families.text_encoders import clip_component, encoded_t5, pooled_clip, t5_component
from comfy_tpu.parallel.rules import column, gather, replicate, row
from comfy_tpu.parallel.workload import Matrix, Stack, Workload

_FFN = 4
"""Width of the feed-forward layers, in hidden sizes. diffusers has it fixed."""


class JointBlock(torch.nn.Module):
    """diffusers' single block over text and picture as one sequence, which it puts together and apart in every block.

    Its weights keep their names.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.attn = block.norm, block.attn
        self.proj_mlp, self.act_mlp, self.proj_out = block.proj_mlp, block.act_mlp, block.proj_out

    def forward(
        self, hidden_states: torch.Tensor, temb: torch.Tensor, image_rotary_emb: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        normed, gate = self.norm(hidden_states, emb=temb)
        mlp = self.act_mlp(self.proj_mlp(normed))
        attention = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        # Both are split over tp, and so is proj_out: columns are packed alike on both sides, and one sum is left.
        return hidden_states + gate.unsqueeze(1) * self.proj_out(pack_features((attention, mlp), tp()))


def _build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    refuse_unknown_keys(FluxTransformer2DModel, config)
    model: Any = FluxTransformer2DModel.from_config(dict(config))
    for block in model.transformer_blocks:
        block.attn.processor = JointProcessor()
        for norm in (block.norm1, block.norm1_context):
            norm.linear = Modulation(norm.linear.in_features, norm.linear.out_features)
    for index, block in enumerate(model.single_transformer_blocks):
        block.attn.processor = JointProcessor()
        block.norm.linear = Modulation(block.norm.linear.in_features, block.norm.linear.out_features)
        model.single_transformer_blocks[index] = JointBlock(block)
    built: torch.nn.Module = model
    return built


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKL

    refuse_unknown_keys(AutoencoderKL, config)
    return AutoencoderKL.from_config(dict(config))


def _packed(config: Config) -> tuple[Packed, ...]:
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    return (Packed("single_transformer_blocks.*.proj_out.weight", (hidden, _FFN * hidden)),)


TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("FluxTransformer2DModel",),
    heads="num_attention_heads",
    build=_build_transformer,
    stacks=(
        LayerStack("transformer_blocks", carry=("encoder_hidden_states", "hidden_states")),
        LayerStack("single_transformer_blocks"),
    ),
    float32=("time_text_embed.*",),
    # Not the modulations: a product with one row is as fast as its weights are read, and the answer scales everything.
    quantized=(
        "transformer_blocks.*.attn.to_*",
        "transformer_blocks.*.attn.add_[qkv]_proj",
        "transformer_blocks.*.ff*.net.*",
        "single_transformer_blocks.*.attn.to_[qkv]",
        "single_transformer_blocks.*.proj_*",
    ),
    rules=(
        column("transformer_blocks.*.norm1*.linear.*"),
        column("transformer_blocks.*.attn.to_[qkv].*"),
        column("transformer_blocks.*.attn.add_[qkv]_proj.*"),
        row("transformer_blocks.*.attn.to_out.0.weight"),
        replicate("transformer_blocks.*.attn.to_out.0.bias"),
        row("transformer_blocks.*.attn.to_add_out.weight"),
        replicate("transformer_blocks.*.attn.to_add_out.bias"),
        replicate("transformer_blocks.*.attn.norm_*.weight"),  # over one head, so every device has all of it
        column("transformer_blocks.*.ff*.net.0.proj.*"),
        row("transformer_blocks.*.ff*.net.2.weight"),
        replicate("transformer_blocks.*.ff*.net.2.bias"),
        column("single_transformer_blocks.*.norm.linear.*"),
        column("single_transformer_blocks.*.attn.to_[qkv].*"),
        replicate("single_transformer_blocks.*.attn.norm_*.weight"),
        column("single_transformer_blocks.*.proj_mlp.*"),
        row("single_transformer_blocks.*.proj_out.weight"),  # packed
        replicate("single_transformer_blocks.*.proj_out.bias"),
        gather("time_text_embed.*.weight"),
        replicate("time_text_embed.*.bias"),
        gather("context_embedder.weight"),
        replicate("context_embedder.bias"),
        gather("x_embedder.weight"),
        replicate("x_embedder.bias"),
        gather("norm_out.linear.weight"),
        replicate("norm_out.linear.bias"),
        gather("proj_out.weight"),
        replicate("proj_out.bias"),
    ),
    packed=_packed,
)

VAE = ComponentSpec(
    name="vae",
    classes=("AutoencoderKL",),
    build=_build_vae,
    rules=(replicate("*"),),  # 0.17 GB; the picture is split over the mesh, not the weights
)


def latent_channels(config: Config) -> int:
    return int(config.get("latent_channels", 16))


def latent_statistics(config: Config) -> tuple[list[float], list[float]]:
    channels = latent_channels(config)
    return [float(config["shift_factor"])] * channels, [1 / float(config["scaling_factor"])] * channels


def clean_prompt(text: str) -> str:
    """diffusers' Flux pipeline changes nothing."""
    return text


def encode_pooled(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pooled": pooled_clip(module, input_ids)}


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"text": encoded_t5(module, input_ids)}


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {
        "pooled": (config["pooled_projection_dim"],),
        "text": (settings.max_sequence_length, config["joint_attention_dim"]),
    }


def prepare(module: Any, pooled: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of the prompt's embeddings no step changes."""
    embedder = module.time_text_embed.text_embedder
    return {
        "pooled": embedder(pooled.to(embedder.linear_1.weight.dtype)),
        "text": module.context_embedder(text.to(module.context_embedder.weight.dtype)),
    }


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    pooled: torch.Tensor,
    text: torch.Tensor,
) -> torch.Tensor:
    """diffusers' forward, from what `prepare` made of the prompt."""
    batch, _, _, height, width = latents.shape
    dtype = module.x_embedder.weight.dtype
    hidden = module.x_embedder(as_tokens(latents).to(dtype))
    embed = module.time_text_embed
    condition = embed.timestep_embedder(embed.time_proj(timestep.expand(batch)))
    if module.config.guidance_embeds:
        condition = condition + embed.guidance_embedder(embed.time_proj(1000 * guidance_scale.expand(batch)))
    condition = (condition + pooled).to(dtype)
    text_tokens = text.shape[1]
    rotary = rope_tables(module.pos_embed, text_tokens, height // 2, width // 2, latents.device)
    for block in module.transformer_blocks:
        text, hidden = block(hidden_states=hidden, encoder_hidden_states=text, temb=condition, image_rotary_emb=rotary)
    hidden = joined(text, hidden)
    for block in module.single_transformer_blocks:
        hidden = block(hidden_states=hidden, temb=condition, image_rotary_emb=rotary)
    _, hidden = parted(hidden, text_tokens)
    return as_latents(module.proj_out(module.norm_out(hidden, condition)), height, width)


def rope_tables(
    positions: Any, text_tokens: int, rows: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, text and picture tokens, 1, head_dim / 2], in the order of `joined`.

    Of rows and of columns on the host, in float64 as diffusers has it, and put together on the devices: the whole
    table would be a constant of megabytes in the program. Text is at 0, 0, 0.
    """
    pairs = [size // 2 for size in positions.axes_dim]
    angles = [
        np.outer(np.arange(count), 1.0 / positions.theta ** (np.arange(size) / size))
        for count, size in zip((1, rows, columns), pairs, strict=True)
    ]

    def table(function: Any) -> torch.Tensor:
        text, down, across = (torch.from_numpy(function(x).astype(np.float32)).to(device) for x in angles)
        picture = torch.cat(
            (
                text.view(1, 1, -1).expand(rows, columns, -1),
                down.unsqueeze(1).expand(-1, columns, -1),
                across.unsqueeze(0).expand(rows, -1, -1),
            ),
            dim=-1,
        )
        at_zero = torch.full((1, text_tokens, sum(pairs)), float(function(0.0)), device=device)
        return joined(at_zero, picture.flatten(0, 1).unsqueeze(0)).unsqueeze(2)

    return table(np.cos), table(np.sin)


def decode_frame(module: Any, latent: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
    """[batch, channels, 1, height, width] of the transformer's latents -> the picture. Nothing is remembered."""
    mean, std = (torch.tensor(x, device=latent.device).view(1, -1, 1, 1) for x in latent_statistics(module.config))
    x = (latent.squeeze(2) * std + mean).to(module.decoder.conv_in.weight.dtype)
    pixels = module.decoder(x if module.post_quant_conv is None else module.post_quant_conv(x))
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 1).unsqueeze(1), []


def encode_picture(module: Any, picture: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A sample of what the VAE sees in a picture, as diffusers' image-to-image pipeline takes it."""
    pixels = picture.permute(0, 3, 1, 2).mul(2).sub(1).to(module.encoder.conv_in.weight.dtype)
    moments = module.encoder(pixels)
    moments = (moments if module.quant_conv is None else module.quant_conv(moments)).float()
    middle, spread = moments.chunk(2, dim=1)
    sample = middle + torch.exp(0.5 * spread.clamp(-30, 20)) * noise.squeeze(2)
    mean, std = (torch.tensor(x, device=sample.device).view(1, -1, 1, 1) for x in latent_statistics(module.config))
    return ((sample - mean) / std).unsqueeze(2)


def picture_tokens(settings: GenerationSettings) -> int:
    return (settings.height // 16) * (settings.width // 16)


def dynamic_shift(settings: GenerationSettings) -> float:
    """The flow shift that Flux.1 dev was trained for at a size: more for more tokens. flow_shift is a factor on it."""
    return settings.flow_shift * shift_by_tokens({"use_dynamic_shifting": True}, picture_tokens(settings))


def euler(settings: GenerationSettings) -> Any:
    """From sigma 1 to 1/steps, as diffusers' Flux pipeline asks for, and not to the last one of training."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    steps = settings.num_inference_steps
    scheduler = FlowMatchEulerDiscreteScheduler(shift=settings.flow_shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
    return scheduler


def _shifted(factory: SchedulerFactory) -> SchedulerFactory:
    return lambda settings: factory(dataclasses.replace(settings, flow_shift=dynamic_shift(settings)))


SCHNELL_SCHEDULERS: dict[str, SchedulerFactory] = {"euler": euler, "unipc": unipc, "dpm++": dpm}
DEV_SCHEDULERS = {name: _shifted(factory) for name, factory in SCHNELL_SCHEDULERS.items()}

_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "num_single_layers",
    "in_channels",
    "joint_attention_dim",
    "pooled_projection_dim",
)


def workload(config: Config, settings: GenerationSettings) -> Workload:
    # What a configuration leaves out is as in the published models, which is where diffusers has its defaults from.
    config = {**_PUBLISHED, **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    hidden, channels = heads * head_dim, config["in_channels"]
    ffn, embedders = _FFN * hidden, 3 if config.get("guidance_embeds") else 2
    square = (hidden, hidden)
    double, single = config["num_layers"], config["num_single_layers"]
    return Workload(
        batch=settings.num_videos,
        tokens=picture_tokens(settings),
        text_tokens=settings.max_sequence_length,
        text="joint",
        heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        stacks=(
            Stack(
                layers=double,
                matrices=(
                    Matrix("column", (6 * hidden, hidden), count=2, rows="samples"),
                    *(
                        matrix
                        for rows in ("tokens", "text")
                        for matrix in (
                            Matrix("column", square, count=3, rows=rows),
                            Matrix("row", square, rows=rows),
                            Matrix("column", (ffn, hidden), rows=rows),
                            Matrix("row", (hidden, ffn), rows=rows),
                        )
                    ),
                ),
            ),
            Stack(
                layers=single,
                matrices=(
                    Matrix("column", (3 * hidden, hidden), rows="samples"),
                    Matrix("column", square, count=3, rows="both"),
                    Matrix("column", (ffn, hidden), rows="both"),
                    Matrix("row", (hidden, hidden + ffn), rows="both"),
                ),
            ),
        ),
        outer=(
            Matrix("gather", (hidden, 256), itemsize=4, count=embedders - 1, rows="samples"),
            Matrix("gather", square, itemsize=4, count=embedders - 1, rows="samples"),
            Matrix("gather", (hidden, config["pooled_projection_dim"]), itemsize=4, used=False),
            Matrix("gather", square, itemsize=4, used=False),
            Matrix("gather", (hidden, config["joint_attention_dim"]), used=False),
            Matrix("gather", (hidden, channels)),
            Matrix("gather", (2 * hidden, hidden), rows="samples"),
            Matrix("gather", (channels, hidden)),
        ),
        small_bytes=2
        * (double * (2 * (13 * hidden + ffn) + 4 * head_dim) + single * (7 * hidden + ffn + 2 * head_dim)),
        output_features=channels,
        latent_bytes=settings.num_videos * channels * picture_tokens(settings) * 4,
    )


_PUBLISHED: Config = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": (16, 56, 56),
}


def _is_flux(index: Config, config: Config) -> bool:
    return index.get("_class_name") == "FluxPipeline"


FLUX_DEV = VideoFamily(
    name="Flux.1 dev",
    matches=lambda index, config: _is_flux(index, config) and bool(config.get("guidance_embeds")),
    pipeline_classes=("FluxPipeline",),
    transformers=(TRANSFORMER,),
    text_encoders=(
        TextEncoder(clip_component("text_encoder"), encode_pooled, length=77),
        TextEncoder(t5_component("text_encoder_2"), encode_text, tokenizer="tokenizer_2"),
    ),
    vae=VAE,
    limits=Limits(
        size_multiple=16,
        size_min=16,
        size_max=2048,
        frames_multiple=1,
        frames_max=1,
        schedulers=tuple(DEV_SCHEDULERS),
    ),
    defaults=GenerationSettings(
        height=1024,
        width=1024,
        num_frames=1,
        num_inference_steps=28,
        guidance_scale=3.5,
        flow_shift=1.0,
        scheduler="euler",
    ),
    presets={str(size): {"height": size, "width": size} for size in (512, 768, 1024)},
    schedulers=DEV_SCHEDULERS,
    spatial_scale=8,
    temporal_scale=1,
    latent_channels=latent_channels,
    latent_statistics=latent_statistics,
    clean_prompt=clean_prompt,
    embedding_shapes=embedding_shapes,
    prepare=prepare,
    predict=predict,
    decode_frame=decode_frame,
    encode_picture=encode_picture,
    workload=workload,
    published={"black-forest-labs/FLUX.1-dev": {**_PUBLISHED, "guidance_embeds": True}},
    guidance="embedded",
    lora_names=flux_names,
)

FLUX_SCHNELL = dataclasses.replace(
    FLUX_DEV,
    name="Flux.1 schnell",
    matches=lambda index, config: _is_flux(index, config) and not config.get("guidance_embeds"),
    limits=dataclasses.replace(FLUX_DEV.limits, schedulers=tuple(SCHNELL_SCHEDULERS)),
    defaults=dataclasses.replace(FLUX_DEV.defaults, num_inference_steps=4, guidance_scale=0.0, max_sequence_length=256),
    schedulers=SCHNELL_SCHEDULERS,
    published={"black-forest-labs/FLUX.1-schnell": {**_PUBLISHED, "guidance_embeds": False}},
    guidance="none",
)
