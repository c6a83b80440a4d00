"""The colours of a model's latents in previews: from `preview.json` in its directory, or learned from its videos."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from comfy_tpu.errors import CheckpointError

PREVIEW_FILE = "preview.json"
_KEYS = ("rgb_bias", "rgb_factors", "rgb_products")
_LATER_KEY = "later_frames"
_RIDGE = 1.0
"""Against weights that fit one video's pixels only."""
_LEARNED_VIDEOS = 4
"""From which colours are learned; the first of a server has one step and little contrast."""


@dataclasses.dataclass(frozen=True)
class PreviewColours:
    """Colours as a polynomial of second degree of a latent. On held-out videos of the demo model its root mean square
    error is 0.11 of a range of 1 for first frames (a line's 0.12) and 0.17 for later ones (a line's 0.22)."""

    weights: torch.Tensor
    """[features, 3], for colours in 0..1; without the products of channels, [1 + channels, 3]."""
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
        count = 1 + channels + channels * (channels + 1) // 2
        try:
            rows = [document.get("rgb_bias"), *document.get("rgb_factors", ()), *document.get("rgb_products", ())]
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
        is_linear = len(weights) == 1 + latents.shape[-1]
        features = linear_features(latents) if is_linear else preview_features(latents)
        return (features @ weights).clamp(0, 1)


def _as_rows(weights: torch.Tensor, channels: int) -> dict[str, Any]:
    rows = [[round(value, 4) for value in row] for row in weights.tolist()]
    return dict(zip(_KEYS, (rows[0], rows[1 : channels + 1], rows[channels + 1 :]), strict=True))


def linear_features(latents: torch.Tensor) -> torch.Tensor:
    """[..., channels] -> [..., 1 + channels]: one, and the channels."""
    return torch.cat([torch.ones_like(latents[..., :1]), latents], dim=-1)


def preview_features(latents: torch.Tensor) -> torch.Tensor:
    """[..., channels] -> [..., features]: one, the channels, and the products of two of them."""
    first, second = torch.triu_indices(latents.shape[-1], latents.shape[-1])
    products = latents[..., first] * latents[..., second]
    return torch.cat([linear_features(latents), products], dim=-1)


class ColourFit:
    """Weights of features that give colours, by least squares."""

    def __init__(self) -> None:
        self._squares: torch.Tensor | None = None
        self._products: torch.Tensor | None = None

    def add(self, features: torch.Tensor, colours: torch.Tensor) -> None:
        """[..., features], and the colours that they stand for, [..., 3]."""
        rows, target = features.flatten(0, -2).double(), colours.flatten(0, -2).double()
        squares, products = rows.T @ rows, rows.T @ target
        self._squares = squares if self._squares is None else self._squares + squares
        self._products = products if self._products is None else self._products + products

    def solve(self) -> torch.Tensor:
        """[features, 3]."""
        if self._squares is None or self._products is None:
            raise ValueError("nothing was added; call add first")
        return torch.linalg.solve(self._squares + _RIDGE * torch.eye(len(self._squares)), self._products).float()


class LearnedColours:
    """The colours of a model without `preview.json`: a linear map, fitted to its first videos."""

    def __init__(self) -> None:
        self._first, self._later = ColourFit(), ColourFit()
        self._count = 0
        self._lock = threading.Lock()
        self.colours: PreviewColours | None = None
        """None: no video has been seen."""

    @property
    def is_learning(self) -> bool:
        return self._count < _LEARNED_VIDEOS

    def watch(self, latents: torch.Tensor, parts: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields decoded frames [videos, t, height, width, 3] as they come, and learns from the first video at the end
        of them. latents: [videos, channels, frames, height, width], in the transformer's scale."""
        pooled, height, width = [], *latents.shape[-2:]
        for part in parts:
            pooled.append(torch.nn.functional.adaptive_avg_pool2d(part[0].movedim(-1, 1).float(), (height, width)))
            yield part
        with self._lock:
            self._learn(latents[0].movedim(0, -1).float(), torch.cat(pooled).movedim(1, -1))

    def _learn(self, latents: torch.Tensor, colours: torch.Tensor) -> None:
        """[frames, height, width, channels] and [more frames, height, width, 3]."""
        frames, features = len(latents), linear_features(latents)
        if frames > 1 and (len(colours) - 1) % (frames - 1):
            return  # it cannot be told which frames a latent stands for
        self._first.add(features[0], colours[0])
        if frames > 1:
            self._later.add(features[1:], colours[1:].unflatten(0, (frames - 1, -1)).mean(dim=1))
        self._count += 1
        self.colours = PreviewColours(self._first.solve(), self._later.solve() if frames > 1 else None)
