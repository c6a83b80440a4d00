"""Parts of long videos for the training of the decoder, those that it shows worst more often than the others.

Its convolutions reach 30 latents back. While the first latent is in reach the decoder can take colours from there; one
that has seen little of what comes later lets a green disc turn cyan in frame 120, where the latents say green.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from tools.demo_model import long_clips
from tools.demo_model.clips import draw
from tools.demo_model.denoised_latents import denoise_clips
from tools.demo_model.shortcuts import PART_REACH, decode_part, decode_whole, denormalise

logger = logging.getLogger(__name__)
SWAPPED = (5, 24)  # latents of its own clip that a part has before it, at least and at most, behind another clip's


@dataclass(frozen=True)
class LongDecoding:
    """What `VaeTraining` has under the same names, with ``long_`` before them."""

    clips: int  # encoded once
    latents: int  # of each
    batch: int
    frames: int  # of each clip, somewhere in it, in a step
    beginnings: float  # share of steps that have the first frames, beside those that do by chance
    noise: float  # deviation of what is added to latents, which are not exact either
    lasting: float  # that of what is added to all latents of a clip alike, at most: a transformer's errors last
    swapped: float  # share of parts before which another clip's latents stand, so that colours are taken from near ones
    hard: float  # share of a batch that is drawn by how wrong it was when that was last measured
    denoised_by: str  # a model: half of the clips are as its transformer makes them (denoised_latents.py)


class LongClipPool:
    def __init__(self, vae: AutoencoderKLWan, settings: LongDecoding, generator: torch.Generator) -> None:
        """``vae``: one that takes whole clips."""
        self._vae, self._settings, self._generator = vae, settings, generator
        self._clips = long_clips.sample_beginnings(settings.clips, settings.latents, generator)
        self._latents = long_clips.encode(vae, self._clips)
        logger.info("%d long clips encoded", settings.clips)
        if settings.denoised_by:
            half = torch.arange(settings.clips // 2, device=self._latents.device)
            given = self._clips.take(half), self._latents[half]
            self._latents[half] = denoise_clips(Path(settings.denoised_by), *given, generator)
            logger.info("%d clips denoised", len(half))
        self._errors: Tensor | None = None
        if settings.hard:
            self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Finds how wrong every clip is in each part of it: by its worst frame there."""
        rows = torch.arange(len(self._latents), device=self._latents.device)
        parts = [self._worst(rows[some : some + 16]) for some in range(0, len(rows), 16)]
        self._errors = torch.cat(parts)
        by_part = [round(value, 5) for value in self._errors.mean(0).tolist()]
        logger.info("worst frames of parts: mean %s, largest %.4f", by_part, float(self._errors.max()))

    def _worst(self, rows: Tensor) -> Tensor:
        with self._autocast():
            decoded = decode_whole(self._vae, denormalise(self._vae, self._latents[rows]))
        frames = decoded.shape[2]
        video = draw(long_clips.frames_of(self._clips.take(rows), 0, frames)) * 2 - 1
        by_frame = (decoded.float() - video).square().mean(dim=(1, 3, 4))
        count = -(-frames // self._settings.frames)
        padded = torch.nn.functional.pad(by_frame, (0, count * self._settings.frames - frames))
        return padded.unflatten(1, (count, self._settings.frames)).amax(2)

    def decode(self) -> tuple[Tensor, Tensor]:
        """Parts of some clips, and what the decoder makes of their latents."""
        settings, latents = self._settings, self._latents
        last = long_clips.SCALE * (settings.latents - 1) + 1 - settings.frames
        margin = settings.frames // 2  # so that the frames at both ends are seen as often as the others
        begin = int(torch.randint(-margin, last + margin, (), generator=self._generator, device=latents.device))
        if self._uniform() < settings.beginnings:
            begin = 0
        begin = min(begin, last) if begin >= PART_REACH else 0  # two shapes: cuDNN chooses kernels for each
        end = begin + settings.frames
        chosen = self._choose((begin + margin) // settings.frames)
        if begin == 0:  # later latents change nothing
            latents = latents[:, :, : (end - 2) // long_clips.SCALE + 2]
        latents = latents[chosen] + self._noise(latents[chosen])
        if begin and self._uniform() < settings.swapped:
            latents = self._swap_before(latents, (begin - 1) // long_clips.SCALE + 1)
        given = denormalise(self._vae, latents)
        with self._autocast():
            decoded = decode_part(self._vae, given, begin, end)
        return draw(long_clips.frames_of(self._clips.take(chosen), begin, end)) * 2 - 1, decoded

    def _choose(self, part: int) -> Tensor:
        """Rows of the pool."""
        settings, device = self._settings, self._latents.device
        hard = 0 if self._errors is None else round(settings.hard * settings.batch)
        even = torch.randint(len(self._latents), (settings.batch - hard,), generator=self._generator, device=device)
        if self._errors is None or not hard:
            return even
        shares = self._errors[:, min(part, self._errors.shape[1] - 1)]
        return torch.cat([even, torch.multinomial(shares, hard, replacement=True, generator=self._generator)])

    def _noise(self, latents: Tensor) -> Tensor:
        def draw_normal(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=self._generator, device=like.device)

        noise = self._settings.noise * draw_normal(latents)
        if self._settings.lasting:
            first = latents[:, :, :1]
            size = torch.rand(len(first), generator=self._generator, device=first.device).view(-1, 1, 1, 1, 1)
            noise = noise + self._settings.lasting * size * draw_normal(first)
        return noise

    def _swap_before(self, latents: Tensor, part: int) -> Tensor:
        """Latents [B, z, K, h, w] that are another clip's until some latents before the number ``part``."""
        near, far = SWAPPED
        kept = int(torch.randint(near, far + 1, (), generator=self._generator, device=latents.device))
        end = max(part - kept, 0)
        return torch.cat([latents[:, :, :end].roll(1, dims=0), latents[:, :, end:]], dim=2)

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, device=self._latents.device))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._latents.device.type, torch.bfloat16, enabled=self._latents.is_cuda)
