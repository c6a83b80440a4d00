"""One step of a transformer of equal blocks, in the sizes that its cost depends on."""

from __future__ import annotations

import dataclasses
import math

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

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Workload:
    batch: int
    """Videos, times two for the branches of guidance."""
    tokens: int
    text_tokens: int
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
    models: int = 1
    """Transformers of this size that stay on the devices; a step runs one of them."""
    dense_max_tokens: int = AttentionConfig.dense_max_tokens
    """Sequences up to this length take dense attention, which smooths no keys."""

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim
