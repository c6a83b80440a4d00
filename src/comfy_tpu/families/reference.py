"""How diffusers itself runs a model.

A family's directory may have a `reference.py` with `REFERENCES`, by hub id, and `SMALL`: by component, the values in
which a small model differs from the family's first published one. Benchmarks read it; running a model does not.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from comfy_tpu.families.card import Config, FamilyCard


def decode_video(module: Any, latents: torch.Tensor) -> torch.Tensor:
    pixels: torch.Tensor = module.decode(latents, return_dict=False)[0]
    return pixels


def decode_image(module: Any, latents: torch.Tensor) -> torch.Tensor:
    return decode_video(module, latents.squeeze(2)).unsqueeze(2)


def encode_video(module: Any, pixels: torch.Tensor) -> torch.Tensor:
    latents: torch.Tensor = module.encode(pixels, return_dict=False)[0].mode()
    return latents


def encode_image(module: Any, pixels: torch.Tensor) -> torch.Tensor:
    return encode_video(module, pixels.squeeze(2)).unsqueeze(2)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A published model as diffusers runs it."""

    predict: Callable[..., torch.Tensor]
    """(diffusers' transformer, latents, timestep, guidance_scale, settings, **embeddings) -> velocity, by diffusers'
    own forward, called as its pipeline does. Dtypes are those of the transformer's weights."""
    decode: Callable[[Any, torch.Tensor], torch.Tensor] = decode_video
    """(diffusers' VAE, latents in the VAE's own scale) -> pixels [batch, 3, frames, height, width] in -1..1."""
    encode: Callable[[Any, torch.Tensor], torch.Tensor] = encode_video
    """(diffusers' VAE, pixels as `decode` returns them) -> latents as `decode` takes them, without noise."""


def load_references(family: FamilyCard) -> tuple[Mapping[str, Reference], Mapping[str, Config]]:
    """The `REFERENCES` and `SMALL` of the family's reference.py; both empty where the family has none."""
    name = f"{family.package}.reference"
    if importlib.util.find_spec(name) is None:
        return {}, {}
    module = importlib.import_module(name)
    return module.REFERENCES, module.SMALL
