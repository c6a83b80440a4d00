"""Which keys a query attends to: causal masks, windows, lengths and mask arrays of torch's SDPA."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.kernels.windows import TileSchedule


@dataclasses.dataclass(frozen=True)
class Band:
    """Query i sees keys i - left … i + right; None: no limit on that side. Causal is Band(None, 0).

    One form for causal and local windows, so that every kernel has one rule for the blocks it may skip.
    """

    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None


FULL = Band()


@dataclasses.dataclass(frozen=True)
class Masking:
    """Everything that hides keys in one call. Arrays are local to the device that computes.

    No field needs a score-sized array except `dense`, and that one comes from the caller.
    """

    band: Band = FULL
    offset: int | Array = 0
    """Position of the first query minus position of the first key; differs by device when sequences are sharded."""
    lengths: Array | None = None
    """int32 [B]: keys from here on are hidden. May be negative or beyond the end."""
    queries_end: bool = False
    """Whether queries from `lengths` on are padding, too: nobody uses their results, which may be zeros. For
    self-attention of whole sequences."""
    keys: Array | None = None
    """bool (True: attend) or float32 (added) [B, Lk]: the same for every head and query."""
    dense: Array | None = None
    """bool or float32, four dimensions, each 1 or full: [B, Hq, Lq, Lk]."""
    tiles: TileSchedule | None = None
    """The tiles that the first `tiles.tokens` queries attend to among as many keys. Other tokens see and are seen by
    all."""


def make_band(is_causal: bool, window: tuple[int, int] | None) -> Band:
    if window is None:
        return Band(right=0) if is_causal else FULL
    left, right = window
    if left < 0 or right < 0:
        raise InvalidValueError(
            f"window={window} has a negative side; expected (left, right) with both >= 0, the number of tokens seen on "
            "each side; use is_causal=True to hide everything on the right"
        )
    return Band(left, 0 if is_causal else right)


def split_mask(mask: Array, batch: int, heads: int, queries: int, keys: int) -> tuple[Array | None, Array | None]:
    """The caller's mask as (key mask [B, Lk], None) if it is the same for every head and query, else (None, mask)."""
    full = (batch, heads, queries, keys)
    if mask.ndim > 4 or any(size not in (1, whole) for size, whole in zip(mask.shape[::-1], full[::-1], strict=False)):
        raise InvalidValueError(
            f"mask has shape {tuple(mask.shape)}, which does not broadcast to [batch, heads, queries, keys] = "
            f"{list(full)}; each dimension must be 1 or full"
        )
    if mask.dtype != jnp.bool_:
        if not jnp.issubdtype(mask.dtype, jnp.floating):
            raise InvalidValueError(
                f"mask has dtype {mask.dtype}; expected bool (True: attend) or a float that is added to the scores; "
                "convert an integer 0/1 mask with mask.astype(bool)"
            )
        mask = mask.astype(jnp.float32)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[1] == 1 and mask.shape[2] == 1:
        return jnp.broadcast_to(mask[:, 0, 0, :], (batch, keys)), None
    return None, mask


def as_bool_mask(mask: Array) -> Array:
    """A key mask as bool: True where the key can have any weight. NaN counts as True: it must reach the result."""
    return mask if mask.dtype == jnp.bool_ else ~jnp.isneginf(mask)


def visible_keys(masking: Masking, keys: int) -> Array | None:
    """bool [B, Lk]: the keys that lengths and the key mask do not hide. None: all keys."""
    visible = None
    if masking.lengths is not None:
        visible = jnp.arange(keys) < masking.lengths[:, None]
    if masking.keys is not None:
        shown = as_bool_mask(masking.keys)
        visible = shown if visible is None else visible & shown
    return visible


def show_first(key: Array, value: Array, masking: Masking) -> tuple[Array, Array, Array | None]:
    """Keys and values [B, H, Lk, D] and int32 lengths [B] that hide what lengths and a bool key mask hide, for kernels
    that know lengths only. None: nothing is hidden.

    Without a band the order of keys does not matter, so the visible ones go first. Sorting takes 33 µs of an H200 for
    4,352 keys: give lengths where there is a choice.
    """
    lengths = None if masking.lengths is None else jnp.clip(masking.lengths, 0, key.shape[2]).astype(jnp.int32)
    if masking.keys is None:
        return key, value, lengths
    visible = masking.keys if lengths is None else masking.keys & (jnp.arange(key.shape[2]) < lengths[:, None])
    order = jnp.argsort(~visible, axis=1, stable=True)[:, None, :, None]
    key, value = (jnp.take_along_axis(array, order, axis=2) for array in (key, value))
    return key, value, jnp.sum(visible, axis=1).astype(jnp.int32)


def key_bias(mask: Array) -> Array:
    """A key mask as float32 to add to the scores."""
    return jnp.where(mask, 0.0, -jnp.inf).astype(jnp.float32) if mask.dtype == jnp.bool_ else mask


def merge_attention(out: Array, logsumexp: Array, partial: Array, partial_logsumexp: Array) -> tuple[Array, Array]:
    """Merges attentions over different keys, float32 [..., Lq, Dv] with log-sum-exp [..., Lq], into one over both."""
    total = jnp.logaddexp(logsumexp, partial_logsumexp)
    # A row that has seen no key yet has logsumexp -inf on both sides; its weights must be 0, not NaN.
    anchor = jnp.where(jnp.isneginf(total), 0.0, total)
    weight = jnp.exp(logsumexp - anchor)[..., None]
    partial_weight = jnp.exp(partial_logsumexp - anchor)[..., None]
    return out * weight + partial.astype(out.dtype) * partial_weight, total
