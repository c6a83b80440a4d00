"""The sound of a video: a waveform on the host."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Waveform:
    """The sounds of several videos."""

    samples: Float[Tensor, "videos channels samples"]
    """float32 in -1..1."""
    rate: int
    """Samples per second."""

    def fitted(self, seconds: float) -> Waveform:
        """Cut, or filled up with silence, to this length: a model's last latent may end a few hundredths of a second
        before or after the last frame."""
        wanted = round(seconds * self.rate)
        missing = max(0, wanted - self.samples.shape[2])
        return Waveform(torch.nn.functional.pad(self.samples, (0, missing))[..., :wanted], self.rate)

    def row(self, index: int) -> Waveform:
        """That of one video."""
        return Waveform(self.samples[index : index + 1], self.rate)
