"""ComfyUI's own sampling, and how far two results are apart. Import it where ComfyUI runs."""

from __future__ import annotations

from typing import Any

import nodes
import torch

from tests import closeness
from tests.native.architectures import Architecture, noise

STEPS = 3


def sample(
    model: Any,
    architecture: Architecture,
    sampler: str = "euler",
    *,
    seed: int = 3,
    steps: int = STEPS,
    cfg: float = 4.0,
    batch: int = 1,
    size: int = 0,
    tokens: int | None = None,
    negative_tokens: int | None = None,
    prompt_seed: int = 1,
    more: dict[str, Any] | None = None,
    latent: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """What the KSampler node gives. `more` is added to both prompts, as nodes behind a text encoder do. `latent`: of a
    model whose latent is no single tensor."""
    tokens = tokens or architecture.tokens[0]
    positive, negative = (
        [[embeddings, {**extra, **(more or {})}] for embeddings, extra in architecture.prompt(length, text, size)]
        for length, text in ((tokens, prompt_seed), (negative_tokens or tokens, prompt_seed + 50))
    )
    latent = latent or {"samples": noise(9, batch, *architecture.latents[size]) * 0.1}
    with torch.inference_mode():  # as ComfyUI runs every node
        (result,) = nodes.common_ksampler(
            model, seed, steps, cfg, sampler, "simple", positive, negative, latent, **options
        )
    return result["samples"]


def relative_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    assert expected.shape == got.shape
    assert expected.dtype == got.dtype
    assert torch.isfinite(expected).all()
    assert torch.isfinite(got).all()
    return float((expected - got).abs().max() / expected.abs().max())


def psnr(expected: torch.Tensor, got: torch.Tensor) -> float:
    """In decibels, of the range that the expected values have."""
    assert expected.shape == got.shape
    assert torch.isfinite(got).all()
    return closeness.psnr(expected, got, span=float(expected.max() - expected.min()))
