"""Chooses the kernel of an attention call, and how it uses the sequence axis, from shapes and the placement alone.

The backend of this process is never asked: programs are lowered for TPUs on machines that have none.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from comfy_tpu.config import AttentionConfig, AttentionImplementation, MeshSizes, Platform, SequenceParallel
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import InvalidValueError, MeshError, UnsupportedError
from comfy_tpu.kernels import cudnn, hopper
from comfy_tpu.kernels.masking import FULL, Band
from comfy_tpu.kernels.tiled import SPLASH_TILE_TOKENS
from comfy_tpu.kernels.windows import TileSchedule
from comfy_tpu.parallel.mesh import check_heads, divisors

Implementation = Literal["splash", "hopper", "cudnn", "chunked", "dense"]
Strategy = Literal["ulysses", "ring", "whole_keys"]
"""How a sequence axis larger than one is used. whole_keys: every device holds all keys and a share of the queries."""

_HOPPER_TOKENS = 4096
_CUDNN_HEAD_DIM = 128
_CUDNN_HEAD_DIM_HOPPER = 256
_HOPPER = ("h100", "h200", "gh200")
HOPPER_AND_LATER = (*_HOPPER, "b200", "gb200", "b300", "gb300")


@dataclasses.dataclass(frozen=True)
class Call:
    """The facts that the choice depends on; sizes are those of the whole call, not of one device's share."""

    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: DTypeLike
    band: Band = FULL
    key_mask: Literal["none", "bool", "float"] = "none"
    dense_mask: bool = False
    has_lengths: bool = False
    tiles: TileSchedule | None = None


def choose_strategy(call: Call, platform: Platform, sizes: MeshSizes, config: AttentionConfig) -> Strategy:
    _check_name("sequence_parallel", config.sequence_parallel, get_args(SequenceParallel))
    if call.tiles is not None:
        return _tiles_strategy(call, sizes, config)
    if call.heads == 1:
        return "whole_keys"
    check_heads(call.heads, sizes.tp)
    # Text tokens are few: holding them everywhere costs nothing, and no device waits for another. A dense mask lies
    # along queries × keys: sharing out only the queries keeps its rows where they are used.
    cross = call.queries != call.keys and call.keys <= config.dense_max_tokens
    if sizes.sp == 1 or cross or call.dense_mask:
        return "whole_keys"
    local_heads = call.heads // sizes.tp
    if config.sequence_parallel == "ulysses" and local_heads % sizes.sp:
        raise MeshError(
            f"heads={local_heads} a device ({call.heads} over tp={sizes.tp}) is not divisible by sp={sizes.sp}, which "
            f'sequence_parallel="ulysses" needs; choose sp from {divisors(local_heads)}, or sequence_parallel="ring"'
        )
    if config.sequence_parallel != "auto":
        return config.sequence_parallel
    if local_heads % sizes.sp == 0:
        return "ulysses"
    # jax.nn rounds cuDNN's log-sum-exp to bfloat16, too coarse to merge the parts of a ring: on GPUs cuDNN over
    # gathered keys beats a ring over the chunked fallback.
    return "whole_keys" if platform == "gpu" else "ring"


def _tiles_strategy(call: Call, sizes: MeshSizes, config: AttentionConfig) -> Strategy:
    """Ulysses, or no division of the sequence: a tile attends to others of the whole video."""
    check_heads(call.heads, sizes.tp)
    if sizes.sp == 1:
        return "whole_keys"
    local_heads = call.heads // sizes.tp
    if config.sequence_parallel == "ring" or local_heads % sizes.sp:
        raise MeshError(
            f"attention_window is of tiles, which need whole sequences on a device and so heads divisible by tp·sp, "
            f"but sequence_parallel={config.sequence_parallel} with heads={local_heads} a device and sp={sizes.sp} "
            f"passes parts of them around; choose sp from {divisors(local_heads)} and ulysses, or "
            "attention_window=full",
            field="attention_window",
        )
    return "ulysses"


def choose_implementation(
    call: Call, platform: Platform, chip: str, config: AttentionConfig, *, sharded: Strategy | None
) -> Implementation:
    """`sharded`: the strategy where sp > 1, None where every device sees whole sequences."""
    _check_name("implementation", config.implementation, get_args(AttentionImplementation))
    fallback: Implementation = "dense" if _is_short(call, config) else "chunked"
    if config.implementation == "chunked":
        return fallback
    if config.implementation == "splash":
        _refuse("splash", splash_refusal(call, platform))
        return "splash"
    if config.implementation == "hopper":
        _refuse("hopper", hopper_refusal(call, platform, chip, sharded))
        return "hopper"
    if config.implementation == "cudnn":
        _refuse("cudnn", cudnn_refusal(call, platform, chip, sharded))
        return "cudnn"
    if platform == "tpu" and fallback == "chunked" and splash_refusal(call, platform) is None:
        return "splash"
    if min(call.queries, call.keys) >= _HOPPER_TOKENS and hopper_refusal(call, platform, chip, sharded) is None:
        return "hopper"
    if platform == "gpu" and cudnn_refusal(call, platform, chip, sharded) is None:
        return "cudnn"
    return fallback


def has_int8_kernel(platform: Platform, chip: str) -> bool:
    """Whether attention is faster here where queries and keys meet in 8 bits."""
    return platform == "gpu" and chip in _HOPPER and hopper.is_installed()


def has_int8_scores(call: Call, config: AttentionConfig, *, sharded: Strategy | None) -> bool:
    """Whether queries and keys of this call are to meet in 8 bits.

    The mean of all keys is taken off them first. So they do not where keys are hidden, which may hold anything, nor in
    a ring, where no device has all of them.
    """
    sees_all = call.band.is_full and call.key_mask == "none" and not (call.dense_mask or call.has_lengths or call.tiles)
    is_long = min(call.queries, call.keys) >= config.int8_min_tokens
    return config.implementation == "int8" and sees_all and sharded != "ring" and is_long


def splash_refusal(call: Call, platform: Platform) -> str | None:
    """Why this call cannot be given to the splash kernel; None: it can."""
    if platform == "gpu":
        return "it is a TPU kernel (interpreted on CPU) and the placement is gpu; choose cudnn or chunked"
    if call.dense_mask:
        return "the mask differs by query or head; pass a mask of shape [B, 1, 1, Lk], kv_lengths, is_causal or window"
    if jnp.dtype(call.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"dtype is {jnp.dtype(call.dtype)}; expected bfloat16 or float32"
    if call.tiles is not None and call.tiles.rows() > SPLASH_TILE_TOKENS:
        return f"a tile has {call.tiles.rows()} tokens; choose tiles of at most {SPLASH_TILE_TOKENS}, or chunked"
    return None


def hopper_refusal(call: Call, platform: Platform, chip: str, sharded: Strategy | None) -> str | None:
    """Why this call cannot be given to our Hopper kernel; None: it can."""
    if platform != "gpu" or chip.lower() not in _HOPPER:
        return f"it runs on {', '.join(_HOPPER)} and the placement is {chip}; choose auto or cudnn"
    if not hopper.is_installed():
        return (
            f"Pallas for GPUs needs JAX's CUDA plugin and absl-py: {install_command('cuda')}; or choose auto or cudnn"
        )
    if jnp.dtype(call.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"dtype is {jnp.dtype(call.dtype)}; expected bfloat16 or float16"
    if call.head_dim != call.value_dim or call.head_dim not in (64, 128):
        return f"head_dim is {call.head_dim} (values {call.value_dim}); expected 64 or 128 for both"
    if call.tiles is not None:
        return "it has no windows of tiles, which are for splash and chunked; choose auto"
    if call.dense_mask or call.key_mask == "float" or not call.band.is_full:
        return (
            "it hides keys from all queries or from none: pass kv_lengths, or a bool mask of shape [B, 1, 1, Lk]; "
            "is_causal and windows are for cudnn, other masks for chunked"
        )
    if sharded == "ring":
        return 'it gives no log-sum-exps, which a ring needs; choose sequence_parallel="ulysses"'
    return None


def cudnn_refusal(call: Call, platform: Platform, chip: str, sharded: Strategy | None) -> str | None:
    """Why this call cannot be given to cuDNN; None: it can."""
    largest = _CUDNN_HEAD_DIM_HOPPER if chip.lower() in HOPPER_AND_LATER else _CUDNN_HEAD_DIM
    band = call.band
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs and the placement is {platform}; choose auto or chunked"
    if not cudnn.is_installed():
        return "JAX's CUDA plugin is not installed here; install jax[cuda13], or choose auto or chunked"
    if jnp.dtype(call.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"dtype is {jnp.dtype(call.dtype)}; expected bfloat16 or float16"
    if call.head_dim != call.value_dim or call.head_dim % 8 or call.head_dim > largest:
        return (
            f"head_dim is {call.head_dim} (values {call.value_dim}); expected the same for both, a multiple of 8, "
            f"at most {largest} on {chip}"
        )
    if call.tiles is not None:
        return "it has no windows of tiles, which are for splash and chunked; choose auto"
    if call.dense_mask or call.key_mask == "float" or (call.key_mask == "bool" and not band.is_full):
        return "the mask would need an array of queries × keys; pass kv_lengths, or a bool mask of shape [B, 1, 1, Lk]"
    if not band.is_full and band.right != 0:
        return f"window has a right side of {band.right}; cuDNN has left windows only (is_causal=True)"
    if band.left is not None and call.queries > call.keys:
        return f"a window over {call.queries} queries and {call.keys} keys; cuDNN wants at least as many keys"
    if sharded == "ring":
        return 'a ring needs exact log-sum-exps; choose sequence_parallel="ulysses"'
    if sharded == "whole_keys" and not band.is_full:
        return "queries are sharded, and cuDNN counts causal positions and windows from the first one it is given"
    return None


def _is_short(call: Call, config: AttentionConfig) -> bool:
    """Whether the score array is small enough to be made. Both sides count: Wan's cross-attention at 720p has few keys
    but many queries, and its scores (75,600 × 512 × 40 heads) would be 6.2 GB of float32."""
    return call.keys <= config.dense_max_tokens and call.queries * call.keys <= config.dense_max_tokens**2


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedError(f'attention implementation="{name}" cannot take this call: {reason}')


def _check_name(field: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        raise InvalidValueError(f'{field}="{got}" is unknown; choose from {", ".join(known)}', field=field)
