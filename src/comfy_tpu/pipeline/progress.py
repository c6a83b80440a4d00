"""What a pipeline says while it works; a progress bar or a node listens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Stage = Literal["loading", "compiling", "encoding", "denoising", "decoding"]


@dataclasses.dataclass(frozen=True)
class Progress:
    stage: Stage
    what: str
    """"transformer", "832×480×81" and the like."""
    done: int
    total: int
    """Bytes while loading, steps while denoising, latent frames while decoding, 1 otherwise."""
    from_cache: bool = False
    """With a finished "compiling": the persistent cache had the program."""
    preview: Callable[[], torch.Tensor] | None = None
    """After a step: fetches the first frame's latents as the model sees them finished, [1, channels, 1, height, width]
    in the transformer's scale. Only while the listener runs: the next step takes over their memory."""
    reused: bool = False
    """After a step: the transformer did not run, what it said before was used again."""


Listener = Callable[[Progress], None]
"""Called from the thread that runs the pipeline. What it raises ends the run: that is how a run is cancelled."""


def ignore(progress: Progress) -> None:
    """For those who do not want to know."""
