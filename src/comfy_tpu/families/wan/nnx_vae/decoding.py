"""Runs videos through the Flax VAE: one part at a time, or whole with the loop over parts inside the program.

The first part is a single frame, which is not resampled in time. All others have the same shapes, and so do their
caches, so the loop over them is a scan. Unrolled, the program grows with the video.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from comfy_tpu.config import MESH_AXES
from comfy_tpu.families.wan.nnx_vae.layers import COLUMNS, Cache, Video
from comfy_tpu.families.wan.nnx_vae.vae import WanVAE
from comfy_tpu.parallel.constraints import Axes

Part = Callable[[WanVAE, Video, Cache], tuple[Video, Cache]]

FRAMES_PER_PART = 4
"""Frames that the encoder reads at a time after the first, as in diffusers."""

_CHANNELS_FIRST: Axes = (None, None, None, None, MESH_AXES)
DECODE_FRAME_AXES = {"latent": _CHANNELS_FIRST, "cache": COLUMNS}
ENCODE_FRAMES_AXES = {"pixels": _CHANNELS_FIRST, "cache": COLUMNS}
DECODE_AXES = {"latents": COLUMNS}
ENCODE_AXES = {"video": COLUMNS}


def decode_frame(
    vae: WanVAE, latent: Float[Array, "batch channels 1 height width"], cache: Cache
) -> tuple[Float[Array, "batch t rows columns 3"], Cache]:
    """A family's `decode_frame`: the transformer's latents -> frames in 0..1, one frame for the first latent."""
    mean, std = _statistics(vae)
    pixels, cache = vae.decode_part(jnp.moveaxis(latent, 1, -1) * std + mean, cache)
    return (pixels + 1) / 2, cache


def encode_frames(
    vae: WanVAE, pixels: Float[Array, "batch 3 t rows columns"], cache: Cache
) -> tuple[Float[Array, "batch channels 1 height width"], Cache]:
    """A family's `encode_frames`: frames in -1..1, the first one alone -> the transformer's latents."""
    mean, std = _statistics(vae)
    moments, cache = vae.encode_part(jnp.moveaxis(pixels, 1, -1), cache)
    latents = (jnp.split(moments, 2, axis=-1)[0] - mean) / std
    return jnp.moveaxis(latents, -1, 1), cache


def decode(vae: WanVAE, latents: Video) -> Video:
    """Latents in the VAE's own scale -> pixels in -1..1, like diffusers' `decode`."""
    return _run_scanned(WanVAE.decode_part, vae, latents, 1)


def decode_unrolled(vae: WanVAE, latents: Video) -> Video:
    return _run_unrolled(WanVAE.decode_part, vae, latents, 1)


def encode(vae: WanVAE, video: Video) -> Video:
    """Pixels in -1..1 -> mean and log variance, like diffusers' `encode`. Frames after the last whole part are
    dropped."""
    return _run_scanned(WanVAE.encode_part, vae, video, FRAMES_PER_PART)


def encode_unrolled(vae: WanVAE, video: Video) -> Video:
    return _run_unrolled(WanVAE.encode_part, vae, video, FRAMES_PER_PART)


def _run_scanned(part: Part, vae: WanVAE, video: Video, frames: int) -> Video:
    count = (video.shape[1] - 1) // frames
    first, cache = part(vae, video[:, :1], None)
    if count == 0:
        return first

    @nnx.scan(in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    def run_part(vae: WanVAE, cache: Cache, frames: Video) -> tuple[Cache, Video]:
        result, cache = part(vae, frames, cache)
        return cache, result

    batch, _, *image_shape = video.shape
    parts = video[:, 1 : 1 + count * frames].reshape(batch, count, frames, *image_shape)
    _, results = run_part(vae, cache, parts)
    return jnp.concatenate((first, results.reshape(batch, -1, *results.shape[3:])), axis=1)


def _run_unrolled(part: Part, vae: WanVAE, video: Video, frames: int) -> Video:
    result, cache = part(vae, video[:, :1], None)
    results = [result]
    for start in range(1, video.shape[1] - frames + 1, frames):
        result, cache = part(vae, video[:, start : start + frames], cache)
        results.append(result)
    return jnp.concatenate(results, axis=1)


def _statistics(vae: WanVAE) -> tuple[Array, Array]:
    return jnp.asarray(vae.architecture.latents_mean), jnp.asarray(vae.architecture.latents_std)
