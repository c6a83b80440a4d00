"""The layers of the Wan 2.1 VAE, over [batch, frames, height, width, channels].

Every layer that looks back in time takes a cache of the frames before, and returns the next cache with its result:
`y, cache = layer(x, cache)`. The cache is None at the beginning of a video.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from comfy_tpu.config import MESH_AXES, AttentionConfig
from comfy_tpu.kernels import attention
from comfy_tpu.kernels.convolution import conv3d_by_taps
from comfy_tpu.parallel.constraints import Axes, constrain
from comfy_tpu.parallel.placement import Placement

Video = Float[Array, "batch frames height width channels"]
Cache = Any
"""A tree of arrays, in the order of the layers that own them. None: at the beginning of a video."""
Layer = Callable[[Video, Cache], tuple[Video, Cache]]

COLUMNS: Axes = (None, None, None, MESH_AXES)
"""The axes of a VAE's images: columns over the whole mesh."""

_NORM_EPSILON = 1e-24
"""torch's normalize divides by at least 1e-12, which matters for pixels of zeros only."""


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The dtype, placement and attention of the layers."""

    dtype: np.dtype
    placement: Placement
    attention: AttentionConfig = AttentionConfig()

    def split_columns(self, tree: Any) -> Any:
        """Constrains every array of a tree to be split by columns, evenly or not; for use inside a program."""
        spec = PartitionSpec(*COLUMNS)
        return jax.tree.map(lambda array: constrain(array, self.placement, spec), tree)

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.dtype}


def run_in_sequence(layers: Sequence[Layer], x: Video, caches: Cache) -> tuple[Video, Cache]:
    """Runs layers one after the other; their caches are in the same order."""
    after = []
    for layer, before in zip(layers, caches or (None,) * len(layers), strict=True):
        x, cache = layer(x, before)
        after.append(cache)
    return x, tuple(after)


def norm(features: int, config: LayerConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(features, epsilon=_NORM_EPSILON, **config.dtypes, rngs=rngs)


def _convolve_by_taps(
    x: Video, kernel: Array, strides: Sequence[int], padding: Sequence[tuple[int, int]], **unused: Any
) -> Video:
    return conv3d_by_taps(x, kernel, strides, padding)


class CausalConv3d(nnx.Conv):
    """A convolution that looks back in time, with zeros before the first frame."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: tuple[int, int, int] = (3, 3, 3),
        *,
        time_stride: int = 1,
        config: LayerConfig,
        rngs: nnx.Rngs,
    ) -> None:
        taps, rows, columns = kernel_size
        on_cpu = config.placement.platform == "cpu"
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides=(time_stride, 1, 1),
            padding=((0, 0), (rows // 2, rows // 2), (columns // 2, columns // 2)),
            conv_general_dilated=_convolve_by_taps if on_cpu else jax.lax.conv_general_dilated,
            **config.dtypes,
            rngs=rngs,
        )
        self.cache_frames = taps - time_stride
        """The number of frames in the cache."""

    def empty_cache(self, x: Video) -> Cache:
        return jnp.zeros((x.shape[0], self.cache_frames, *x.shape[2:]), x.dtype)

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:  # type: ignore[override]
        seen = jnp.concatenate((self.empty_cache(x) if cache is None else cache, x), axis=1)
        return super().__call__(seen), seen[:, -self.cache_frames :]


class ResidualBlock(nnx.Module):
    def __init__(self, in_features: int, out_features: int, config: LayerConfig, rngs: nnx.Rngs) -> None:
        self.norm1 = norm(in_features, config, rngs)
        self.conv1 = CausalConv3d(in_features, out_features, config=config, rngs=rngs)
        self.norm2 = norm(out_features, config, rngs)
        self.conv2 = CausalConv3d(out_features, out_features, config=config, rngs=rngs)
        self.conv_shortcut = (
            None if in_features == out_features else nnx.Linear(in_features, out_features, **config.dtypes, rngs=rngs)
        )

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x)
        change, cache = run_in_sequence((self._first, self._second), x, cache)
        return change + shortcut, cache

    def _first(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        return self.conv1(nnx.silu(self.norm1(x)), cache)

    def _second(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        return self.conv2(nnx.silu(self.norm2(x)), cache)


class AttentionBlock(nnx.Module):
    """Attention with one head over the pixels of each frame. It needs no cache."""

    def __init__(self, features: int, config: LayerConfig, rngs: nnx.Rngs) -> None:
        self.norm = norm(features, config, rngs)
        self.to_qkv = nnx.Linear(features, 3 * features, **config.dtypes, rngs=rngs)
        self.proj = nnx.Linear(features, features, **config.dtypes, rngs=rngs)
        self.config = config

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        batch, frames, height, width, features = x.shape
        pixels = self.to_qkv(self.norm(x)).reshape(batch * frames, 1, height * width, 3 * features)
        query, key, value = jnp.split(pixels, 3, axis=-1)
        seen = attention(query, key, value, placement=self.config.placement, config=self.config.attention)
        # Left to itself, XLA may come out of the attention with rows and columns both split.
        return x + self.config.split_columns(self.proj(seen.reshape(x.shape))), cache


class Downsample(nnx.Module):
    """Halves rows and columns; with `in_time` also the frames after the first."""

    def __init__(self, features: int, config: LayerConfig, rngs: nnx.Rngs, *, in_time: bool) -> None:
        self.resample = nnx.Conv(
            features, features, (3, 3), strides=2, padding=((0, 1), (0, 1)), **config.dtypes, rngs=rngs
        )
        self.time_conv = (
            CausalConv3d(features, features, (3, 1, 1), time_stride=2, config=config, rngs=rngs) if in_time else None
        )

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        x = self.resample(x)
        if self.time_conv is None:
            return x, None
        return (x, x) if cache is None else self.time_conv(x, cache)


class Upsample(nnx.Module):
    """Doubles rows and columns, with half the features; with `in_time` also the frames after the first."""

    def __init__(self, features: int, config: LayerConfig, rngs: nnx.Rngs, *, in_time: bool) -> None:
        self.resample = nnx.Conv(features, features // 2, (3, 3), padding=1, **config.dtypes, rngs=rngs)
        self.time_conv = CausalConv3d(features, 2 * features, (3, 1, 1), config=config, rngs=rngs) if in_time else None

    def __call__(self, x: Video, cache: Cache) -> tuple[Video, Cache]:
        if self.time_conv is not None:
            x, cache = self._double_frames(self.time_conv, x, cache)
        return self.resample(x.repeat(2, axis=2).repeat(2, axis=3)), cache

    def _double_frames(self, time_conv: CausalConv3d, x: Video, cache: Cache) -> tuple[Video, Cache]:
        if cache is None:  # the first frame stays one, and is forgotten: the second sees zeros before it
            return x, time_conv.empty_cache(x)
        batch, frames, height, width, features = x.shape
        pairs, cache = time_conv(x, cache)
        pairs = jnp.moveaxis(pairs.reshape(batch, frames, height, width, 2, features), 4, 2)
        return pairs.reshape(batch, 2 * frames, height, width, features), cache
