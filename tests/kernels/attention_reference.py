"""torch's scaled_dot_product_attention as the reference, and random inputs for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AbstractMesh, Mesh

from comfy_tpu.config import AttentionConfig, Platform
from comfy_tpu.kernels import attention
from comfy_tpu.parallel.placement import Placement


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options of one call; `mask` is the shape of a random mask, 1 or full in each dimension."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    queries: int = 77
    keys: int = 77
    head_dim: int = 16
    value_dim: int = 16
    is_causal: bool = False
    scale: float | None = None
    window: tuple[int, int] | None = None
    lengths: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    mask_kind: str = "bool"

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        arrays: dict[str, Any] = {
            "query": rng.standard_normal((self.batch, self.heads, self.queries, self.head_dim), np.float32),
            # Keys far from zero: what K-smoothing is for, and what shows if it were wrong.
            "key": rng.standard_normal((self.batch, self.kv_heads, self.keys, self.head_dim), np.float32) + 1.0,
            "value": rng.standard_normal((self.batch, self.kv_heads, self.keys, self.value_dim), np.float32),
        }
        if self.mask is not None:
            bools = rng.random(self.mask) < 0.7
            floats = rng.standard_normal(self.mask, np.float32)
            floats = np.where(bools, floats, -np.inf).astype(np.float32)
            arrays["mask"] = bools if self.mask_kind == "bool" else floats
        if self.lengths is not None:
            arrays["kv_lengths"] = np.array(self.lengths, np.int32)
        return arrays

    def options(self) -> dict[str, Any]:
        return {
            "is_causal": self.is_causal,
            "scale": self.scale,
            "window": self.window,
            "enable_gqa": self.heads != self.kv_heads,
        }

    def expected(self, inputs: dict[str, Any]) -> np.ndarray:
        # float64: what is left over is the error of the kernel, not of the reference.
        query, key, value = (torch.tensor(np.asarray(inputs[n], np.float64)) for n in ("query", "key", "value"))
        common = {"scale": self.scale, "enable_gqa": self.heads != self.kv_heads}
        sdpa = torch.nn.functional.scaled_dot_product_attention
        if self.window is None and self.lengths is None:
            mask = None
            if self.mask is not None:
                mask = torch.tensor(inputs["mask"])
                mask = mask if self.mask_kind == "bool" else mask.double()
            return sdpa(query, key, value, attn_mask=mask, is_causal=self.is_causal, **common).numpy()
        added = np.zeros((self.batch, self.heads, self.queries, self.keys), np.float64)
        if self.mask is not None:
            mask = inputs["mask"]
            added += np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask
        rows, columns = np.arange(self.queries)[:, None], np.arange(self.keys)[None, :]
        if self.is_causal:
            added[:, :, columns > rows] = -np.inf
        if self.window is not None:
            added[:, :, (columns < rows - self.window[0]) | (columns > rows + self.window[1])] = -np.inf
        for index, length in enumerate(self.lengths or ()):
            added[index, :, :, length:] = -np.inf
        return sdpa(query, key, value, attn_mask=torch.tensor(added), **common).numpy()


def unoptimised(call: Callable[[dict[str, Any]], jax.Array], inputs: dict[str, Any]) -> jax.Array:
    """Under jit, but as plain machine code: these programs run for milliseconds, and optimising takes seconds."""
    return jax.jit(call).lower(inputs).compile(compiler_options={"xla_backend_optimization_level": 0})(inputs)


def run(
    case: Case,
    config: AttentionConfig,
    placement: Placement | None = None,
    *,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """What attention gives under jit, and what torch gives for the same (already rounded) inputs."""
    inputs = case.inputs(seed)
    for name in ("query", "key", "value"):
        inputs[name] = jnp.asarray(inputs[name], dtype)
    got = unoptimised(lambda arrays: attention(**arrays, placement=placement, config=config, **case.options()), inputs)
    assert got.dtype == dtype
    return np.asarray(got, np.float32), case.expected(inputs)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def cpu_placement(dp: int = 1, sp: int = 1, tp: int = 1) -> Placement:
    devices = np.array(jax.devices()[: dp * sp * tp]).reshape(dp, sp, tp)
    return Placement(Mesh(devices, ("dp", "sp", "tp")), "cpu", "cpu")


def abstract_placement(platform: Platform, chip: str, dp: int = 1, sp: int = 1, tp: int = 1) -> Placement:
    return Placement(AbstractMesh((dp, sp, tp), ("dp", "sp", "tp")), platform, chip)
