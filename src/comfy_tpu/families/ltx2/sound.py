"""The sound of LTX-2: a VAE of spectrograms, and a vocoder that makes a waveform of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.families.ltx2 import card
from comfy_tpu.families.model_family import Sound
from comfy_tpu.parallel.rules import replicate

_TIME_SCALE = _BINS_SCALE = 4
"""Columns and bins of a spectrogram to a latent."""
_LATENT_CHANNELS, _BINS = 8, 64
"""Diffusers' defaults for values that config.json leaves out."""


def _build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLLTX2Audio

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

    return LTX2Vocoder.from_config(dict(config))


def _build_wideband_vocoder(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers.pipelines.ltx2 import LTX2VocoderWithBWE

    return LTX2VocoderWithBWE.from_config(dict(config))


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


_WIDEBAND_VOCODER = dataclasses.replace(_VOCODER, classes=("LTX2VocoderWithBWE",), build=_build_wideband_vocoder)


def decode(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, features] of the transformer -> [batch, channels, columns, bins]."""
    bins = int(module.config.mel_bins) // _BINS_SCALE
    own = latents.float() * module.latents_std.float() + module.latents_mean.float()
    made: torch.Tensor = module.decoder(own.unflatten(2, (-1, bins)).transpose(1, 2))
    return made


def synthesize(module: Any, spectrogram: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = module(spectrogram.float())
    return made


def synthesize_wideband(module: Any, spectrogram: torch.Tensor) -> torch.Tensor:
    """diffusers' forward, less energies and phases, which nothing reads, and with a first waveform of any length."""
    low = module.vocoder(spectrogram.float())
    padded = F.pad(low, (0, -low.shape[2] % module.config.hop_length))
    bands = module.mel_stft.mel_basis.float() @ _magnitudes(module.mel_stft.stft_fn, padded.flatten(0, 1))
    seen = bands.clamp(min=1e-5).log().unflatten(0, low.shape[:2])
    made: torch.Tensor = (module.bwe_generator(seen.transpose(2, 3)) + module.resampler(padded)).clamp(-1, 1)
    return made[..., : low.shape[2] * module.config.output_sampling_rate // module.config.input_sampling_rate]


def _magnitudes(transform: Any, waveform: torch.Tensor) -> torch.Tensor:
    """[batch, samples] -> [batch, frequencies, columns]; a column ends with its last sample."""
    before = max(0, transform.window_length - transform.hop_length)
    parts = F.conv1d(F.pad(waveform.unsqueeze(1), (before, 0)), transform.forward_basis, stride=transform.hop_length)
    real, imaginary = parts.chunk(2, dim=1)
    return (real**2 + imaginary**2).sqrt()


def latent_shape(config: Config) -> tuple[int, int]:
    return int(config.get("latent_channels", _LATENT_CHANNELS)), int(config.get("mel_bins", _BINS)) // _BINS_SCALE


def sample_rate(config: Config) -> int:
    return int(config.get("output_sampling_rate", 24000))


def wideband_sample_rate(config: Config) -> int:
    return int(config.get("output_sampling_rate", 48000))


SOUND = Sound(_VAE, decode, _VOCODER, synthesize, latent_shape, sample_rate)
WIDEBAND_SOUND = dataclasses.replace(
    SOUND, vocoder=_WIDEBAND_VOCODER, synthesize=synthesize_wideband, sample_rate=wideband_sample_rate
)
"""That of LTX-2.3: its vocoder makes a waveform of 16 kHz, and of the spectrogram of that what is above 8 kHz."""
