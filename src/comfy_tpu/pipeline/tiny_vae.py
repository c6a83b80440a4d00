"""The user's file of a tiny decoder, checked against the model that it is to decode for. Starts no devices."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.compiler.single_file import open_single_file
from comfy_tpu.compiler.weights import WeightSource
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.shared.tiny_files import TinyFile, limit_frames, read_tiny_file
from comfy_tpu.pipeline.model_files import ModelFiles, digest_tensors

TINY_PATTERN = "*tae*.safetensors"
"""Files of a model directory that are looked at where `vae_backend` is tiny and no file is named."""


@dataclasses.dataclass(frozen=True)
class TinyVae:
    """A tiny decoder that fits a model."""

    path: Path
    source: WeightSource
    config: Mapping[str, Any]

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        digest_tensors(self.path, digest)
        return digest.hexdigest()[:16]


def choose_tiny_vae(runtime: RuntimeConfig, files: ModelFiles) -> TinyVae | None:
    """The tiny decoder of a runtime: for decoding where `vae_backend` is tiny, else for previews; None: there is none.

    Raises InvalidValueError where it is asked for and there is no file, CheckpointError for a file of another kind.
    """
    if runtime.tiny_vae is not None:
        return open_tiny_vae(runtime.tiny_vae, files)
    if runtime.vae_backend != "tiny":
        return None
    found = sorted(files.directory.glob(TINY_PATTERN))
    if len(found) != 1:
        there = f"{len(found)} such files are" if found else "none is"
        raise InvalidValueError(
            f"tiny_vae is missing: vae_backend=tiny decodes by a file such as taew2_1.safetensors, and {there} in "
            f"{files.directory}; name the file that was made for {files.name}'s VAE",
            field="tiny_vae",
        )
    return open_tiny_vae(found[0], files)


def open_tiny_vae(path: Path, files: ModelFiles) -> TinyVae:
    try:
        file = read_tiny_file(open_single_file(path))
    except CheckpointError as error:
        raise CheckpointError(f"tiny_vae={error}", field="tiny_vae") from error
    card, channels = files.family.card, files.latent_channels
    if not file.makes_videos and not card.makes_images:
        raise InvalidValueError(
            f"tiny_vae={path} decodes single images, and {files.name} makes videos; use a file of TAEHV, such as "
            "taew2_1.safetensors",
            field="tiny_vae",
        )
    # Flux.2's latents are patches of 2 × 2 of what its VAE, and a decoder in its place, reads.
    patch = 2 if (4 * file.channels, 2 * file.spatial_scale) == (channels, card.spatial_scale) else 1
    if not card.makes_images:
        file = limit_frames(file, card.temporal_scale)
    found = (file.channels * patch**2, file.spatial_scale * patch, file.temporal_scale)
    expected = (channels, card.spatial_scale, found[2] if card.makes_images else card.temporal_scale)
    if found != expected:
        raise InvalidValueError(
            f"tiny_vae={path} decodes latents of {_describe(found, card.makes_images)}, and those of {files.name} have "
            f"{_describe(expected, card.makes_images)}; use the file that was made for its VAE",
            field="tiny_vae",
        )
    return TinyVae(path, file.source, {**file.config, "input_patch": patch, **_statistics(file, files)})


def _statistics(file: TinyFile, files: ModelFiles) -> dict[str, Any]:
    if not file.config["reads_vae_scale"]:
        return {}
    mean, deviation = files.latent_statistics
    return {"mean": list(mean), "std": list(deviation)}


def _describe(facts: tuple[int, int, int], makes_images: bool) -> str:
    channels, pixels, frames = facts
    sides = f"{pixels} × {pixels} pixels"
    return f"{channels} channels and {sides}" if makes_images else f"{channels} channels, {sides} and {frames} frames"
