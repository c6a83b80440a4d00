"""The colours of a model's latents in previews, from `preview.json` in its directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.errors import CheckpointError

PREVIEW_FILE = "preview.json"
_KEYS = ("rgb_bias", "rgb_factors", "rgb_products")


@dataclasses.dataclass(frozen=True)
class PreviewColours:
    """Colours as a polynomial of second degree of a latent; on held-out videos hardly nearer than a line."""

    weights: torch.Tensor
    """[features, 3], for colours in 0..1."""

    @classmethod
    def read(cls, document: Mapping[str, Any], channels: int, path: object) -> PreviewColours:
        """`document`: rgb_bias (3 numbers), rgb_factors (by channel) and rgb_products (by pair of channels)."""
        rows = [document.get("rgb_bias"), *document.get("rgb_factors", ()), *document.get("rgb_products", ())]
        count = 1 + channels + channels * (channels + 1) // 2
        try:
            weights = torch.tensor(rows, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            weights = torch.empty(0)
        if set(document) != set(_KEYS) or weights.shape != (count, 3):
            raise CheckpointError(
                f"{path} does not hold {', '.join(_KEYS)} for {channels} channels, three numbers each; remove it"
            )
        return cls(weights)

    def as_dict(self, channels: int) -> dict[str, Any]:
        rows = [[round(value, 4) for value in row] for row in self.weights.tolist()]
        return dict(zip(_KEYS, (rows[0], rows[1 : channels + 1], rows[channels + 1 :]), strict=True))

    def apply(self, latents: torch.Tensor) -> torch.Tensor:
        """[..., channels], in the transformer's scale -> [..., 3] in 0..1."""
        return (preview_features(latents) @ self.weights).clamp(0, 1)


def preview_features(latents: torch.Tensor) -> torch.Tensor:
    """[..., channels] -> [..., features]: one, the channels, and the products of two of them."""
    first, second = torch.triu_indices(latents.shape[-1], latents.shape[-1])
    products = latents[..., first] * latents[..., second]
    return torch.cat([torch.ones_like(latents[..., :1]), latents, products], dim=-1)
