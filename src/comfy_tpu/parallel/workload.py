"""One step of a transformer of equal blocks, in the sizes that its cost depends on."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from comfy_tpu.config import AttentionConfig
from comfy_tpu.parallel.rules import RuleKind

Rows = Literal["tokens", "text", "both", "samples"]
"""What a matrix multiplies: the tokens of the video, those of the text, all of them, or one row a sample."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    kind: RuleKind
    shape: tuple[int, ...]
    itemsize: int = 2
    count: int = 1
    """How many a block has, or the whole model."""
    used: bool = True
    """A step multiplies with it. False: only the preparation of the prompt does."""
    rows: Rows = "tokens"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Stack:
    """A list of equal blocks."""

    layers: int
    matrices: tuple[Matrix, ...]
    """Of one layer."""
    norms: int = 0
    """Norms in a block over features that tp splits."""


@dataclasses.dataclass(frozen=True)
class Workload:
    batch: int
    """Videos, times two for the branches of guidance."""
    tokens: int
    text_tokens: int
    text: Literal["keys", "joint"]
    """keys: every block reads keys and values that were made of the text before. joint: the text goes through the
    blocks with the video, and one attention is over both."""
    heads: int
    head_dim: int
    ffn: int
    stacks: tuple[Stack, ...]
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
    history: int = 3
    """Samples and answers, each, that the solver keeps."""
    models: int = 1
    """Transformers of this size that stay on the devices; a step runs one of them."""
    dense_max_tokens: int = AttentionConfig.dense_max_tokens
    """Sequences up to this length take dense attention, which smooths no keys."""

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def layers(self) -> int:
        return sum(stack.layers for stack in self.stacks)

    @property
    def sequence(self) -> int:
        """Tokens that attend to each other."""
        return self.tokens + (self.text_tokens if self.text == "joint" else 0)

    @property
    def matrices(self) -> tuple[tuple[int, Matrix], ...]:
        """All of them, each with how often it occurs."""
        stacked = [(stack.layers * matrix.count, matrix) for stack in self.stacks for matrix in stack.matrices]
        return (*stacked, *((matrix.count, matrix) for matrix in self.outer))
