"""What was seen of a pipeline, and what is learned of it, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.shared import schedulers
from comfy_tpu.porting.scaffold.hypotheses import Layout, Reading, agrees
from comfy_tpu.porting.scaffold.watching import Call, Watched


@dataclasses.dataclass(frozen=True)
class Run:
    """Sizes in which nothing is as large as something else."""

    height: int
    width: int
    frames: int
    steps: int
    prompt: str
    negative: str
    watched: Watched
    latents: torch.Tensor
    """What it began with, [1, channels, frames, height, width]."""


@dataclasses.dataclass(frozen=True)
class Embedding:
    name: str
    encoder: str
    reading: Reading
    argument: str
    """Of the transformer's forward."""
    cast: str
    """What is written behind its name there."""


@dataclasses.dataclass
class Learned:
    makes_images: bool
    layout: Layout
    """Of the latents between steps, in the pipeline."""
    arguments: dict[str, str]
    """Of the transformer's forward -> expressions."""
    embeddings: list[Embedding]
    clean: str
    answer: str
    statistics: str
    vae_layout: Layout
    spatial_scale: int
    temporal_scale: int
    frames_multiple: int
    scheduler: str
    """A function of families/shared/schedulers.py; empty: the scheduler's own class, with its configuration."""
    unexplained: list[str]
    """One sentence each."""
    lengths: dict[str, int | None]
    """Tokens of each encoder; None: max_sequence_length."""


def first_text(text: Any) -> Any:
    return text[0] if isinstance(text, (list, tuple)) else text


def tensor(result: Any) -> torch.Tensor:
    if isinstance(result, torch.Tensor):
        return result
    first: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else next(iter(result.values()))
    return first


def batch_of(call: Call) -> int:
    return next(value.shape[0] for value in call.given.values() if isinstance(value, torch.Tensor) and value.ndim > 1)


def literal(value: Any) -> str | None:
    text = repr(value)
    simple = value is None or isinstance(value, (bool, int, float, str, dict, list, tuple))
    return text if simple and "tensor(" not in text else None


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(described(each) for each in value)})"
    return repr(value)


def embedding_name(value: torch.Tensor, reading: Reading, known: list[Embedding]) -> str:
    base = "text_mask" if reading.written == "attention_mask" else "text" if value.ndim == 3 else "pooled"
    taken = sum(each.name.startswith(base) and (each.name == base or each.name[len(base)] == "_") for each in known)
    taken -= sum(each.name.startswith("text_mask") for each in known) if base == "text" else 0
    return base if not taken else f"{base}_{taken + 1}"


def cast(value: torch.Tensor, reading: Reading) -> str:
    if reading.written == "attention_mask":
        return ".bool()" if value.dtype == torch.bool else ".int()" if not value.is_floating_point() else ".to(dtype)"
    return ".to(dtype)"


def euler_scheduler(shift: float, runs: Sequence[Run]) -> str | None:
    """The Euler scheduler of families/shared/schedulers.py with the sigmas of every run."""
    for name in ("euler", "euler_from_one"):
        settings = (GenerationSettings(num_inference_steps=run.steps, flow_shift=shift) for run in runs)
        made = [getattr(schedulers, name)(each) for each in settings]
        if all(agrees(each.sigmas, run.watched.sigmas) for each, run in zip(made, runs, strict=True)):
            return name
    return None
