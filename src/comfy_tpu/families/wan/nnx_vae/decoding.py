"""Videos through the Flax VAE: a part at a time, or whole with the loop over parts inside the program.

The first part, one frame, stands apart: it is not resampled in time. All others are alike, and so is the shape of their
cache, so a loop over them is one part's program scanned. Unrolled, the program grows with the video.
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

FRAMES_OF_A_PART = 4
"""That the encoder reads at a time, behind the first. As in diffusers, no configuration changes it."""

_CHANNELS_FIRST: Axes = (None, None, None, None, MESH_AXES)
DECODE_FRAME_AXES = {"latent": _CHANNELS_FIRST, "cache": COLUMNS}
ENCODE_FRAMES_AXES = {"pixels": _CHANNELS_FIRST, "cache": COLUMNS}
DECODE_AXES = {"latents": COLUMNS}
ENCODE_AXES = {"video": COLUMNS}


def decode_frame(
    vae: WanVAE, latent: Float[Array, "batch channels 1 height width"], cache: Cache
) -> tuple[Float[Array, "batch t rows columns 3"], Cache]:
    """What a family's `decode_frame` does: the transformer's latents -> frames in 0..1, one if it is the first."""
    mean, std = _statistics(vae)
    pixels, cache = vae.decode_part(jnp.moveaxis(latent, 1, -1) * std + mean, cache)
    return (pixels + 1) / 2, cache


def encode_frames(
    vae: WanVAE, pixels: Float[Array, "batch 3 t rows columns"], cache: Cache
) -> tuple[Float[Array, "batch channels 1 height width"], Cache]:
    """What an image family's `encode_frames` does: frames in -1..1, the first alone -> the transformer's latents."""
    mean, std = _statistics(vae)
    moments, cache = vae.encode_part(jnp.moveaxis(pixels, 1, -1), cache)
    latents = (jnp.split(moments, 2, axis=-1)[0] - mean) / std
    return jnp.moveaxis(latents, -1, 1), cache


def decode(vae: WanVAE, latents: Video) -> Video:
    """Latents in the VAE's own scale -> pixels in -1..1, as diffusers' `decode`."""
    return _scanned(WanVAE.decode_part, vae, latents, 1)


def decode_unrolled(vae: WanVAE, latents: Video) -> Video:
    return _unrolled(WanVAE.decode_part, vae, latents, 1)


def encode(vae: WanVAE, video: Video) -> Video:
    """Pixels in -1..1 -> mean and log variance, as diffusers' `encode`. Frames behind the last whole part are left."""
    return _scanned(WanVAE.encode_part, vae, video, FRAMES_OF_A_PART)


def encode_unrolled(vae: WanVAE, video: Video) -> Video:
    return _unrolled(WanVAE.encode_part, vae, video, FRAMES_OF_A_PART)


def _scanned(part: Part, vae: WanVAE, video: Video, frames: int) -> Video:
    count = (video.shape[1] - 1) // frames
    first, cache = part(vae, video[:, :1], None)
    if count == 0:
        return first

    @nnx.scan(in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    def others(vae: WanVAE, cache: Cache, frames: Video) -> tuple[Cache, Video]:
        result, cache = part(vae, frames, cache)
        return cache, result

    batch, _, *picture = video.shape
    parts = video[:, 1 : 1 + count * frames].reshape(batch, count, frames, *picture)
    _, results = others(vae, cache, parts)
    return jnp.concatenate((first, results.reshape(batch, -1, *results.shape[3:])), axis=1)


def _unrolled(part: Part, vae: WanVAE, video: Video, frames: int) -> Video:
    result, cache = part(vae, video[:, :1], None)
    results = [result]
    for start in range(1, video.shape[1] - frames + 1, frames):
        result, cache = part(vae, video[:, start : start + frames], cache)
        results.append(result)
    return jnp.concatenate(results, axis=1)


def _statistics(vae: WanVAE) -> tuple[Array, Array]:
    return jnp.asarray(vae.architecture.latents_mean), jnp.asarray(vae.architecture.latents_std)
