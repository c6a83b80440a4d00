"""One step of a transformer of equal blocks, in the sizes that its cost depends on."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from comfy_tpu.config import AttentionConfig
from comfy_tpu.parallel.rules import RuleKind


@dataclasses.dataclass(frozen=True)
class Matrix:
    kind: RuleKind
    shape: tuple[int, ...]
    itemsize: int = 2
    count: int = 1
    """How many a block has, or the whole model."""
    used: bool = True
    """A step multiplies with it. False: only the preparation of the prompt does."""
    rows: Literal["tokens", "text", "one"] = "tokens"
    """What it is multiplied with: every token of the video or of the text, or one row for all of them."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Workload:
    batch: int
    """Videos, times two for the branches of guidance."""
    tokens: int
    text_tokens: int
    """That the video reads; or, where they are joint, that stand in one sequence with it."""
    layers: int
    heads: int
    head_dim: int
    ffn: int
    block: tuple[Matrix, ...]
    """Of one layer."""
    outer: tuple[Matrix, ...]
    """Outside of the layers."""
    small_bytes: int
    """Biases, norms and tables of all layers, which every device holds."""
    output_features: int
    """Values that the model answers for each token."""
    latent_bytes: int
    """Of one sample of all videos, as the solver keeps it: float32."""
    itemsize: int = 2
    """Of activations."""
    sums: int = 3
    """Sums over tp in a block: one behind each row-parallel product."""
    norms: int = 3
    """Norms in a block over features that tp splits."""
    history: int = 3
    """Samples and answers, each, that the solver keeps."""
    joint: bool = False
    """The text is a stream beside the video: one attention over both, weights of its own."""
    dense_max_tokens: int = AttentionConfig.dense_max_tokens
    """Sequences up to this length take dense attention, which smooths no keys."""

    @property
    def sequence(self) -> int:
        """Tokens that attend to each other."""
        return self.tokens + (self.text_tokens if self.joint else 0)

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim
