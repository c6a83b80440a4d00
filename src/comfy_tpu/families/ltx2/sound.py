"""The sound of LTX-2: a VAE of spectrograms, and a vocoder that makes a waveform of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.ltx2 import card
from comfy_tpu.families.model_family import Sound
from comfy_tpu.families.shared.config_checks import refuse_unknown_keys
from comfy_tpu.parallel.rules import replicate

_TIME_SCALE = _BINS_SCALE = 4
"""Columns and bins of a spectrogram to a latent."""
_LATENT_CHANNELS, _BINS = 8, 64
"""Diffusers' defaults for values that config.json leaves out."""


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLLTX2Audio

    refuse_unknown_keys(AutoencoderKLLTX2Audio, config)
    rate = config.get("sample_rate", 16000) / config.get("mel_hop_length", 160) / _TIME_SCALE
    assert card.LTX2.sound is not None
    if rate != card.LTX2.sound.latents_per_second:
        raise UnsupportedError(
            f"the VAE of the sound has {rate:g} latents per second (sample_rate, mel_hop_length), and that of every "
            f"LTX-2 that was published {card.LTX2.sound.latents_per_second:g}; use one of those"
        )
    return AutoencoderKLLTX2Audio.from_config(dict(config))


def _build_vocoder(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers.pipelines.ltx2 import LTX2Vocoder

    refuse_unknown_keys(LTX2Vocoder, config)
    return LTX2Vocoder.from_config(dict(config))


# In float32, whatever the model's dtype: both are small, and one clip of 8 bits' precision is heard as noise.
_VAE = ComponentSpec(
    name="audio_vae",
    classes=("AutoencoderKLLTX2Audio",),
    build=_build_vae,
    rules=(replicate("*"),),
    float32=("*",),
)
_VOCODER = ComponentSpec(
    name="vocoder",
    classes=("LTX2Vocoder",),
    build=_build_vocoder,
    rules=(replicate("*"),),
    float32=("*",),
)


def decode(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, features] of the transformer -> [batch, channels, columns, bins]."""
    bins = int(module.config.mel_bins) // _BINS_SCALE
    own = latents.float() * module.latents_std.float() + module.latents_mean.float()
    made: torch.Tensor = module.decoder(own.unflatten(2, (-1, bins)).transpose(1, 2))
    return made


def synthesize(module: Any, spectrogram: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = module(spectrogram.float())
    return made


def latent_shape(config: Config) -> tuple[int, int]:
    return int(config.get("latent_channels", _LATENT_CHANNELS)), int(config.get("mel_bins", _BINS)) // _BINS_SCALE


def sample_rate(config: Config) -> int:
    return int(config.get("output_sampling_rate", 24000))


SOUND = Sound(_VAE, decode, _VOCODER, synthesize, latent_shape, sample_rate)
