"""The Wan 2.1 VAE, with the configuration and the names of diffusers' AutoencoderKLWan."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.wan.nnx_vae.layers import (
    AttentionBlock,
    Cache,
    CausalConv3d,
    Downsample,
    LayerConfig,
    ResidualBlock,
    Upsample,
    Video,
    norm,
    run_in_sequence,
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    base_dim: int
    decoder_base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    attn_scales: tuple[float, ...]
    temperal_downsample: tuple[bool, ...]
    in_channels: int
    out_channels: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Parses a config.json; missing values have diffusers' defaults."""
    from diffusers import AutoencoderKLWan

    defaults = {name: option.default for name, option in inspect.signature(AutoencoderKLWan).parameters.items()}
    told = {**defaults, **config}
    if told["is_residual"] or told["patch_size"] is not None:
        raise UnsupportedError(
            f"a Wan VAE with is_residual={told['is_residual']} and patch_size={told['patch_size']}, as in Wan 2.2 5B, "
            "is not written in Flax NNX; run this model through torchax"
        )
    told["decoder_base_dim"] = told["decoder_base_dim"] or told["base_dim"]
    values: dict[str, Any] = {field.name: told[field.name] for field in dataclasses.fields(Architecture)}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Architecture(**(values | lists))


class MidBlock(nnx.Module):
    def __init__(self, features: int, config: LayerConfig, rngs: nnx.Rngs) -> None:
        self.resnets = nnx.List([ResidualBlock(features, features, config, rngs) for _ in range(2)])
        self.attentions = nnx.List([AttentionBlock(features, config, rngs)])

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        return run_in_sequence((self.resnets[0], self.attentions[0], self.resnets[1]), x, cache)


class UpBlock(nnx.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        blocks: int,
        upsampler: Upsample | None,
        config: LayerConfig,
        rngs: nnx.Rngs,
    ) -> None:
        inputs = [in_features] + [out_features] * (blocks - 1)
        self.resnets = nnx.List([ResidualBlock(features, out_features, config, rngs) for features in inputs])
        self.upsamplers = nnx.List([] if upsampler is None else [upsampler])

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        return run_in_sequence((*self.resnets, *self.upsamplers), x, cache)


class Encoder(nnx.Module):
    def __init__(self, architecture: Architecture, config: LayerConfig, rngs: nnx.Rngs) -> None:
        features, scale = architecture.base_dim, 1.0
        self.conv_in = CausalConv3d(architecture.in_channels, features, config=config, rngs=rngs)
        blocks: list[nnx.Module] = []
        for level, multiple in enumerate(architecture.dim_mult):
            for _ in range(architecture.num_res_blocks):
                blocks.append(ResidualBlock(features, architecture.base_dim * multiple, config, rngs))
                features = architecture.base_dim * multiple
                if scale in architecture.attn_scales:
                    blocks.append(AttentionBlock(features, config, rngs))
            if level < len(architecture.dim_mult) - 1:
                blocks.append(Downsample(features, config, rngs, in_time=architecture.temperal_downsample[level]))
                scale /= 2
        self.down_blocks = nnx.List(blocks)
        self.mid_block = MidBlock(features, config, rngs)
        self.norm_out = norm(features, config, rngs)
        self.conv_out = CausalConv3d(features, 2 * architecture.z_dim, config=config, rngs=rngs)

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        return run_in_sequence((self.conv_in, *self.down_blocks, self.mid_block, self._out), x, cache)

    def _out(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        return self.conv_out(nnx.silu(self.norm_out(x)), cache)


class Decoder(nnx.Module):
    def __init__(self, architecture: Architecture, config: LayerConfig, rngs: nnx.Rngs) -> None:
        levels = [architecture.decoder_base_dim * multiple for multiple in reversed(architecture.dim_mult)]
        features = levels[0]
        self.conv_in = CausalConv3d(architecture.z_dim, features, config=config, rngs=rngs)
        self.mid_block = MidBlock(features, config, rngs)
        blocks: list[UpBlock] = []
        for out_features, in_time in zip(levels, (*reversed(architecture.temperal_downsample), None), strict=True):
            upsampler = None if in_time is None else Upsample(out_features, config, rngs, in_time=in_time)
            blocks.append(UpBlock(features, out_features, architecture.num_res_blocks + 1, upsampler, config, rngs))
            features = out_features // 2
        self.up_blocks = nnx.List(blocks)
        self.norm_out = norm(levels[-1], config, rngs)
        self.conv_out = CausalConv3d(levels[-1], architecture.out_channels, config=config, rngs=rngs)

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        return run_in_sequence((self.conv_in, self.mid_block, *self.up_blocks, self._out), x, cache)

    def _out(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        return self.conv_out(nnx.silu(self.norm_out(x)), cache)


class WanVAE(nnx.Module):
    def __init__(self, architecture: Architecture, config: LayerConfig, *, rngs: nnx.Rngs) -> None:
        z_dim = architecture.z_dim
        self.encoder = Encoder(architecture, config, rngs)
        self.quant_conv = nnx.Linear(2 * z_dim, 2 * z_dim, **config.dtypes, rngs=rngs)
        self.post_quant_conv = nnx.Linear(z_dim, z_dim, **config.dtypes, rngs=rngs)
        self.decoder = Decoder(architecture, config, rngs)
        self.architecture = architecture
        self.config = config

    def decode_part(self, latents: Video, cache: Cache) -> tuple[Video, Cache]:
        """Latents in the VAE's own scale, the first of a video alone -> float32 pixels in -1..1."""
        latents, cache = self.config.split_columns((latents.astype(self.config.dtype), cache))
        pixels, cache = self.decoder(self.post_quant_conv(latents), cache)
        return jnp.clip(pixels.astype(jnp.float32), -1, 1), self.config.split_columns(cache)

    def encode_part(self, pixels: Video, cache: Cache) -> tuple[Video, Cache]:
        """Pixels in -1..1, the first frame alone and then four at a time -> float32 mean and log variance."""
        pixels, cache = self.config.split_columns((pixels.astype(self.config.dtype), cache))
        moments, cache = self.encoder(pixels, cache)
        return self.quant_conv(moments).astype(jnp.float32), self.config.split_columns(cache)
