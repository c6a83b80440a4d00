"""What a call returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.facade.given import own_names
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.sound import Waveform


@dataclasses.dataclass(frozen=True)
class Video:
    """The generated frames, on the host. An image is a video of one frame."""

    frames: np.ndarray
    """uint8 [frames, height, width, 3]."""
    prompt: str
    settings: GenerationSettings
    metadata: Mapping[str, str] = dataclasses.field(repr=False)
    """The metadata that `save` writes into files."""
    sound: np.ndarray | None = None
    """float32 [channels, samples] in -1..1, as long as the frames; None of a model that makes no sound."""
    sample_rate: int = 0
    """Samples of the sound per second."""

    def save(self, path: str | Path) -> Path:
        """Writes the video and returns its path. The name chooses the format: .mp4, .gif, .npy, .png, frames/."""
        with own_names(output="path"):
            (target,) = media.check_output(path, dataclasses.replace(self.settings, num_videos=1))
        parts = (torch.from_numpy(frame).float().div(255)[None, None] for frame in self.frames)
        sound = None if self.sound is None else Waveform(torch.from_numpy(self.sound).unsqueeze(0), self.sample_rate)
        media.write_videos([target], parts, fps=self.settings.fps, metadata=[self.metadata], sound=sound)
        return target

    def numpy(self) -> np.ndarray:
        """uint8 [frames, height, width, 3]."""
        return self.frames

    def images(self) -> list[Image.Image]:
        return [Image.fromarray(frame) for frame in self.frames]

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        count, height, width, _ = self.frames.shape
        return f"<Video {width}×{height}, {count} frames, {self.settings.fps} fps, seed {self.settings.seed}>"
