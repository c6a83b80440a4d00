"""The best rates of this device, in the same run: large products, and attention at the model's own length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
import torch.nn.functional as F

from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.timing import ProgressCallback, measure
from comfy_tpu.config import AttentionConfig
from comfy_tpu.kernels.dispatch import attention

_SQUARE, _SMALL_SQUARE = 8192, 512
_SDPA = {"cuda": ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"), "cpu": ("FLASH_ATTENTION",)}


def measure_ceilings(bench: Bench, job: Job, on_progress: ProgressCallback) -> str:
    """Emits the rows; the name of torch's fastest attention backend here, "" where none ran."""
    clock = _Clock(bench, job, on_progress)
    _products(bench, job, clock)
    return _attention(bench, job, clock)


@dataclasses.dataclass(frozen=True)
class _Clock:
    bench: Bench
    job: Job
    on_progress: ProgressCallback

    def jax(self, row: Row, peer: str, function: Callable[..., Any], *arrays: jax.Array) -> Row:
        jitted = jax.jit(function)
        return self._measure(row, peer, lambda: jitted(*arrays), jax.block_until_ready)

    def torch(self, row: Row, peer: str, function: Callable[[], torch.Tensor]) -> Row:
        with torch.no_grad():
            return self._measure(row, peer, function, lambda output: self.bench.synchronize())

    def _measure(self, row: Row, peer: str, call: Callable[[], Any], wait: Callable[[Any], Any]) -> Row:
        # Long samples where a device clocks down under load: what counts is what it can keep up.
        least_s = 0.3 if not self.bench.model.is_small else 0.02
        row = dataclasses.replace(row, peer=peer)
        return measure(row, call, wait, repeats=self.job.repeats, least_s=least_s, on_progress=self.on_progress)


def _products(bench: Bench, job: Job, clock: _Clock) -> None:
    work = bench.model.workload(bench.forward_settings(job.size))
    square = _SMALL_SQUARE if bench.model.is_small else _SQUARE
    for m, k, n in ((square, square, square), (work.tokens, work.hidden, work.ffn)):
        row = Row("ceilings", f"matmul {m}×{k}×{n}", "", size=job.size, flops=2.0 * m * k * n)
        a, b = bench.random(m, k, seed=1), bench.random(k, n, seed=2)
        clock.jax(row, "jax", lambda a, b: a @ b, bench.array(a), bench.array(b))
        if bench.torch_refusal is None:
            clock.torch(row, "torch", functools.partial(torch.matmul, a, b))


def _attention(bench: Bench, job: Job, clock: _Clock) -> str:
    work = bench.model.workload(bench.forward_settings(job.size))
    heads, tokens, head_dim = work.heads, work.sequence, work.head_dim
    row = Row("ceilings", "attention", "", size=job.size, flops=4.0 * heads * tokens**2 * head_dim)
    tensors = [bench.random(1, heads, tokens, head_dim, seed=seed) for seed in (3, 4, 5)]
    arrays = [bench.array(tensor) for tensor in tensors]
    ours = functools.partial(attention, placement=bench.placement, config=AttentionConfig())
    clock.jax(row, "jax, as our program calls it", ours, *arrays)
    if bench.placement.platform == "gpu":
        # [batch, tokens, heads, head_dim] is cuDNN's own order: no transposition is timed.
        swapped = [jax.jit(lambda array: array.swapaxes(1, 2))(array) for array in arrays]
        clock.jax(row, "jax cuDNN", functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), *swapped)
    if bench.torch_refusal is not None:
        return ""
    rows = {
        name: clock.torch(row, f"torch {name}", functools.partial(_only_by, name, tensors))
        for name in _SDPA[bench.device.type]
    }
    timed = {name: row.median_s for name, row in rows.items() if row.median_s is not None}
    return min(timed, key=lambda name: timed[name], default="")


def _only_by(name: str, qkv: Sequence[torch.Tensor]) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, name)):
        return F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
