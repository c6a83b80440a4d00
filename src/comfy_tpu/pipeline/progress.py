"""Progress reports of a pipeline, for progress bars and nodes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

Stage = Literal["loading", "compiling", "encoding", "denoising", "decoding", "interpolating"]


class FetchPreview(Protocol):
    def __call__(self, row: int = 0) -> torch.Tensor:
        """The latents of one of the videos that share the step, as the model predicts them without noise, [1, channels,
        frames, height, width] in the transformer's scale."""
        ...


@dataclasses.dataclass(frozen=True)
class Progress:
    stage: Stage
    what: str
    """The component that is loaded, the program that is compiled, "prompt" or "image" while encoding; else empty."""
    done: int
    total: int
    """Bytes while loading, steps while denoising, latent frames while decoding, 1 otherwise."""
    size: str = ""
    """Width, height and frames, "832×480×81", or the length of a text, where the stage depends on it."""
    model: str = ""
    """The model's name as people know it: "Wan 2.1 T2V 14B"."""
    part: str = ""
    """The component that is loaded or compiled: "text_encoder"."""
    compiles: bool = False
    """With a "compiling" that is not finished: whether XLA compiles; before that, the persistent cache is asked."""
    from_cache: bool = False
    """With a finished "compiling": whether the persistent cache had the program."""
    preview: FetchPreview | None = None
    """After a step: what the videos will show. Only inside the callback: the next step takes over their memory."""
    reused: bool = False
    """After a step: whether the last velocity was reused, and the transformer did not run."""

    @property
    def label(self) -> str:
        """The subject in words: "transformer.denoise_step at 832×480×81"."""
        return " at ".join(filter(None, (self.what, self.size)))


def model_title(name: str) -> str:
    """The name of a model without its owner and format: "Wan-AI/Wan2.1-T2V-14B-Diffusers" -> "Wan 2.1 T2V 14B"."""
    words = re.split(r"[-_\s]+", re.split(r"[\\/]", name.rstrip("\\/"))[-1].removesuffix(".safetensors"))
    title = " ".join(word for word in words if word.lower() != "diffusers")
    return re.sub(r"(?<=[a-z])(?=\d+\.\d)", " ", title) or name


ProgressCallback = Callable[[Progress], None]
"""Called from the thread that runs the pipeline. To cancel the run, raise an exception."""


def ignore_progress(progress: Progress) -> None:
    """Does nothing; the default callback."""
