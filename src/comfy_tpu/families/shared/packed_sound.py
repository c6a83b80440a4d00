"""A video's sound in the latents of the video: its tokens stand behind those of the last frame, in frames of their own
that are filled up with zeros.

A step, a scheduler, a file of latents and a node then carry one array, whatever a model makes besides images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def split_sound(latents: torch.Tensor, frames: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, channels, all frames, height, width] -> the video's latents [batch, channels, frames, height, width], and
    the sound's [batch, tokens, channels]."""
    sound = latents[:, :, frames:].flatten(2).transpose(1, 2)[:, :tokens]
    return latents[:, :, :frames], sound


def join_sound(video: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_sound`."""
    height, width = video.shape[3:]
    padded = (
        F.pad(sound, (0, 0, 0, -sound.shape[1] % (height * width))).transpose(1, 2).unflatten(2, (-1, height, width))
    )
    return torch.cat((video, padded.to(video.dtype)), dim=2)
