"""One step of a transformer of equal blocks, in the sizes that its cost depends on."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from comfy_tpu.config import AttentionConfig
from comfy_tpu.parallel.rules import RuleKind

Rows = Literal["tokens", "text", "both", "samples"]
"""The rows that a matrix multiplies: the tokens of the video, those of the text, both, or one row per sample."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    kind: RuleKind
    shape: tuple[int, ...]
    itemsize: int = 2
    count: int = 1
    """The number of such matrices in a block, or outside of the blocks in the model."""
    used: bool = True
    """Whether a step multiplies with the matrix. False: only the preparation of the prompt does."""
    rows: Rows = "tokens"
    sample_rows: int = 1
    """Rows per sample where `rows` is "samples": 2 where some tokens have another timestep."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Stack:
    """A list of equal blocks."""

    layers: int
    matrices: tuple[Matrix, ...]
    """The matrices of one layer."""
    norms: int = 0
    """The number of norms in a block over features that tp splits."""
    reads_text: bool = True
    """Whether the text goes through these blocks too, where it goes through any."""


@dataclasses.dataclass(frozen=True)
class Workload:
    batch: int
    """Videos, times two for the branches of guidance."""
    tokens: int
    text_tokens: int
    text: Literal["keys", "joint"]
    """keys: every block reads keys and values of the text that were computed before. joint: the text goes through the
    blocks with the video, and attention is over both."""
    heads: int
    head_dim: int
    ffn: int
    stacks: tuple[Stack, ...]
    outer: tuple[Matrix, ...]
    """The matrices outside of the layers."""
    small_bytes: int
    """Biases, norms and tables of all layers, which every device holds."""
    output_features: int
    """Output values of the model per token."""
    latent_bytes: int
    """Bytes of the latents of all videos, in float32 as the solver keeps them."""
    itemsize: int = 2
    """Bytes per value of activations."""
    history: int = 3
    """The number of samples, and of outputs, that the solver keeps."""
    video_latent_bytes: int = 0
    """Bytes of the latents of whole videos, where a step computes them by windows; 0: it computes all of them."""
    calls: int = 1
    """Calls of the program in a step: with windows, each computes some of them."""
    models: int = 1
    """Transformers of this size that stay on the devices; a step runs one of them."""
    dense_max_tokens: int = AttentionConfig.dense_max_tokens
    """Sequences up to this length take dense attention."""

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

    def for_stack(self, stack: Stack) -> Workload:
        """The workload as the blocks of one stack see it: without a text that they do not read."""
        return self if stack.reads_text else dataclasses.replace(self, text="joint", text_tokens=0)

    @property
    def matrices(self) -> tuple[tuple[int, Matrix], ...]:
        """All matrices, each with the number of its occurrences."""
        stacked = [(stack.layers * matrix.count, matrix) for stack in self.stacks for matrix in stack.matrices]
        return (*stacked, *((matrix.count, matrix) for matrix in self.outer))
