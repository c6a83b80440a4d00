"""Embeddings of prompts and images. Needs torch, and not jax: a node that samples elsewhere has them, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

Embeddings = Mapping[str, torch.Tensor]
"""Embeddings by the names of `TextEncoding.embedding_shapes`, one row each."""


@dataclasses.dataclass(frozen=True)
class TimedEmbeddings:
    """The embeddings of a prompt that holds for a part of the steps."""

    start: float
    """The share of the steps before its first one."""
    end: float
    """The share of the steps after its last one is reached."""
    embeddings: Embeddings

    def holds(self, share: float) -> bool:
        """Whether the prompt is that of a step before which this share of the steps is done."""
        return self.start <= share < self.end


@dataclasses.dataclass(frozen=True)
class PromptEmbeddings:
    prompt: str
    positive: Embeddings
    negative: Embeddings | None
    """None without guidance."""
    cut: str = ""
    """The end of the prompt that exceeded the model's token limit."""
    shared: Embeddings = dataclasses.field(default_factory=dict)
    """Embeddings of the given images, which both prompts share."""
    images_fingerprint: str = ""
    """The fingerprint of the given images."""
    timed_positive: tuple[TimedEmbeddings, ...] = ()
    """Prompts that follow each other, one at each step, all of the shapes of `positive`. Empty: `positive` holds."""
    timed_negative: tuple[TimedEmbeddings, ...] = ()

    def at(self, share: float) -> PromptEmbeddings:
        """The prompts of a step before which this share of the steps is done."""
        positive = next((timed.embeddings for timed in self.timed_positive if timed.holds(share)), self.positive)
        negative = next((timed.embeddings for timed in self.timed_negative if timed.holds(share)), self.negative)
        return dataclasses.replace(self, positive=positive, negative=negative)

    @property
    def each(self) -> tuple[PromptEmbeddings, ...]:
        """All pairs of prompts that may hold together."""
        starts = {timed.start for timed in (*self.timed_positive, *self.timed_negative)}
        return tuple(self.at(start) for start in sorted(starts)) or (self,)


def merge_embeddings(prompts: Sequence[PromptEmbeddings]) -> PromptEmbeddings:
    """The embeddings of several prompts as rows of one batch. None of them may be timed, and all share their images."""
    first, *others = prompts
    if not others:
        return first

    def merge(branches: Sequence[Embeddings]) -> Embeddings:
        return {name: torch.cat([branch[name] for branch in branches]) for name in branches[0]}

    negatives = [each.negative for each in prompts if each.negative is not None]
    return PromptEmbeddings(
        first.prompt,
        merge([each.positive for each in prompts]),
        merge(negatives) if negatives else None,
        shared=first.shared,
    )
