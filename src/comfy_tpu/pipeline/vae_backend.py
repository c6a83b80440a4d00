"""What runs a model's VAE: its family's functions on the torch module, or those of the Flax NNX one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from comfy_tpu.config import MESH_AXES, VAE_BACKENDS, VaeBackend
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families import wan
from comfy_tpu.families.family import VideoFamily
from comfy_tpu.nnx import check_vae
from comfy_tpu.parallel.constraints import Axes
from comfy_tpu.pipeline.model_files import ModelFiles

_WIDTH: Axes = (None, None, None, None, MESH_AXES)
"""A VAE's pictures are split by columns over the whole mesh."""


@dataclasses.dataclass(frozen=True)
class VaeFunctions:
    """One part of a video at a time, with the cache of those before."""

    backend: VaeBackend
    decode_frame: Callable[..., Any]
    decode_axes: Mapping[str, Axes]
    encode_frames: Callable[..., Any] | None
    """None: this model reads no pictures."""
    encode_axes: Mapping[str, Axes]


def vae_functions(backend: VaeBackend, family: VideoFamily) -> VaeFunctions:
    if backend == "nnx":
        from comfy_tpu.nnx import decoding

        return VaeFunctions(
            "nnx",
            decoding.decode_frame,
            decoding.DECODE_FRAME_AXES,
            decoding.encode_frames,
            decoding.ENCODE_FRAMES_AXES,
        )
    return VaeFunctions(
        "torchax",
        family.decode_frame,
        {"latent": _WIDTH, "cache": _WIDTH},
        family.image.encode_frames if family.image else None,
        {"pixels": _WIDTH, "cache": _WIDTH},
    )


def check_vae_backend(backend: str, files: ModelFiles) -> None:
    """Before devices are started."""
    if backend not in VAE_BACKENDS:
        raise InvalidValueError(f"vae_backend={backend!r} is unknown; choose from {', '.join(VAE_BACKENDS)}")
    if backend != "nnx":
        return
    if files.family.vae is not wan.VAE:
        name = files.family.name
        raise UnsupportedError(f"vae_backend=nnx: the VAE of {name} is not written in Flax NNX; choose torchax")
    check_vae(files.config(files.family.vae))
