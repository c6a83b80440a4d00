"""Long drawn videos: windows of their latents, as `--num-frames 161` has them, and what a decoder makes of all of them.

The encoder was trained on 17 frames and drifts after them. So each latent is that of a clip of its own, whose last
frames it holds: the encoder sees nothing longer than it knows, and a latent from the middle is that of a clip that has
gone on for a while.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from tools.demo_model.clips import FRAMES, ClipBatch, Tracks, draw, sample_training_tracks
from tools.demo_model.shortcuts import encode_latents

SCALE = 4  # frames of a latent, but of the first one, which has one
CLIP = 1 + (FRAMES - 1) // SCALE  # latents of a clip
WINDOW = 21  # latents of a window: 81 frames
OVERLAP = 11  # latents that two windows share: 41 frames
LONGEST = 57  # latents of a video, at most: 225 frames
USUAL = 41  # latents of half of the videos: 161 frames, of which windows of every second latent see all
FROM_START = 0.5  # share of windows that are the beginning of their video
SPARSE = 0.4  # share of windows of every second latent, which `--context uniform --context-stride 2` has too


@dataclass(frozen=True)
class LongClips:
    """Some latents of long videos, by their numbers."""

    tracks: Tracks
    length: Tensor  # [B] frames of the videos
    latents: Tensor  # [B, K]

    def take(self, rows: Tensor) -> "LongClips":
        tracks = Tracks(*(getattr(self.tracks, field.name)[rows] for field in fields(Tracks)))
        return LongClips(tracks, self.length[rows], self.latents[rows])


def sample_beginnings(count: int, latents: int, generator: torch.Generator) -> LongClips:
    """The first latents of videos that have so many of them, or up to LONGEST."""
    total = _between(latents, torch.full((count,), LONGEST, device=generator.device), generator)
    numbers = torch.arange(latents, device=generator.device).expand(count, -1)
    return LongClips(_sample_tracks(count, generator), (total - 1) * SCALE + 1, numbers)


def sample_windows(count: int, generator: torch.Generator) -> LongClips:
    """Windows of WINDOW latents of videos that have so many of them, or up to LONGEST."""
    device = generator.device
    stride = 1 + (torch.rand(count, generator=generator, device=device) < SPARSE).long()
    span = stride * (WINDOW - 1) + 1
    total = _between(span, torch.full_like(span, LONGEST), generator)
    total = torch.where(torch.rand(count, generator=generator, device=device) < 0.5, USUAL, total)
    start = _between(torch.zeros_like(span), total - span, generator)
    start = start * (torch.rand(count, generator=generator, device=device) >= FROM_START)
    numbers = start[:, None] + stride[:, None] * torch.arange(WINDOW, device=device)
    return LongClips(_sample_tracks(count, generator), (total - 1) * SCALE + 1, numbers)


def encode(vae: AutoencoderKLWan, clips: LongClips) -> Tensor:
    """Normalised latents [B, z, K, h, w], for a VAE that takes whole clips."""
    rows = torch.arange(len(clips.latents), device=clips.latents.device)
    return torch.cat([_encode(vae, clips.take(some)) for some in rows.split(16)])


def repeat_noise(noise: Tensor, latents: Tensor, generator: torch.Generator) -> Tensor:
    """Noise [B, z, WINDOW, h, w] as windows of these latents [B, WINDOW] have it under `--context-noise freenoise`.

    Later latents repeat the noise of earlier ones, shuffled. ``noise`` is that of the first window.
    """
    count, step = len(latents), WINDOW - OVERLAP
    source = torch.arange(LONGEST, device=latents.device).expand(count, -1).clone()
    for start in range(0, LONGEST - WINDOW, step):
        place = start + WINDOW
        spread = torch.rand(count, min(step, LONGEST - place), generator=generator, device=latents.device)
        source[:, place : place + spread.shape[1]] = source.gather(1, spread.argsort(1) + start)
    rows = torch.arange(count, device=latents.device)[:, None]
    return noise.transpose(1, 2)[rows, source.gather(1, latents)].transpose(1, 2)


def frames_of(clips: LongClips, begin: int, end: int) -> ClipBatch:
    """Frames of what a decoder makes of latents that follow one another: the last frame of the first, and all of the
    others."""
    first = clips.latents[:, :1] * SCALE
    return clips.tracks.at(first + torch.arange(begin, end, device=first.device), clips.length)


def _sample_tracks(count: int, generator: torch.Generator) -> Tracks:
    """All that spin turn equally far: windows that begin at other angles are blended into other shapes."""
    tracks = sample_training_tracks(count, generator)
    return replace(tracks, turn=math.pi * (tracks.turn > 0))


def _between(low: int | Tensor, high: Tensor, generator: torch.Generator) -> Tensor:
    """Whole numbers from low to high, both included."""
    spread = torch.rand(high.shape, generator=generator, device=high.device)
    return low + (spread * (high - low + 1)).long()


def _encode(vae: AutoencoderKLWan, clips: LongClips) -> Tensor:
    count, latents = clips.latents.shape
    begin = ((clips.latents - (CLIP - 1)) * SCALE).clamp(min=0)
    frames = begin[..., None] + torch.arange(FRAMES, device=begin.device)
    video = draw(clips.tracks.at(frames.flatten(1), clips.length))
    video = video.unflatten(2, (latents, FRAMES)).transpose(1, 2).flatten(0, 1)
    place = clips.latents.clamp(max=CLIP - 1).flatten()
    encoded = encode_latents(vae, video)[torch.arange(len(video), device=place.device), :, place]
    return encoded.unflatten(0, (count, latents)).transpose(1, 2)
