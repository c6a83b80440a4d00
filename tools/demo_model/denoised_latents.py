"""Latents of drawn clips with the errors that a transformer makes: noised part of the way, and denoised again.

A decoder that was trained on these knows what it will be given. Where the noise leaves enough to be seen, things stay
where they were drawn, so that the drawing is still what it has to show.
"""

import itertools
import random
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_model.captions import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Attributes, paraphrase
from tools.demo_model.clips import Tracks
from tools.demo_model.distil import Teacher, shifted
from tools.demo_model.long_clips import OVERLAP, WINDOW, LongClips

STEPS = 20  # of the whole way from noise, of which a clip takes its part
GUIDANCE = 2.0  # that of long videos
NOISE = (0.3, 0.65)  # how much of it there is at first


@torch.no_grad()
def denoise_clips(model: Path, clips: LongClips, latents: Tensor, generator: torch.Generator) -> Tensor:
    """``latents`` [B, z, K, h, w] of beginnings, as the transformer makes them in windows: of each, what the windows
    before it do not have."""
    teacher = Teacher(model, str(latents.device))
    made = latents.clone()
    for rows in torch.arange(len(latents), device=latents.device).split(128):
        known = 0
        for start in range(0, latents.shape[2] - WINDOW + 1, WINDOW - OVERLAP):
            window = _denoise(teacher, clips.take(rows), latents[rows, :, start : start + WINDOW], generator)
            made[rows, :, known : start + WINDOW] = window[:, :, known - start :]
            known = start + WINDOW
    return made


def _denoise(teacher: Teacher, clips: LongClips, window: Tensor, generator: torch.Generator) -> Tensor:
    rng = random.Random(int(torch.randint(2**30, (), generator=generator, device=generator.device)))
    embeds = teacher.embed([paraphrase(attributes, rng) for attributes in _attributes(clips.tracks)])
    empty = teacher.embed([""]).expand_as(embeds)
    low, high = NOISE
    start = low + (high - low) * rng.random()
    grid = shifted(torch.arange(STEPS + 1) / STEPS)
    grid = torch.cat([torch.tensor([start]), grid[grid < start]])
    noise = torch.randn(window.shape, generator=generator, device=window.device)
    window = (1 - start) * window + start * noise
    for sigma, after in itertools.pairwise(grid):
        timestep = (1000 * sigma).expand(len(window)).to(window.device)
        guided, unguided = (
            teacher.transformer(window, timestep, text, return_dict=False)[0] for text in (embeds, empty)
        )
        window = window + (after - sigma) * (unguided + GUIDANCE * (guided - unguided))
    return window


def _attributes(tracks: Tracks) -> list[Attributes]:
    names = (list(COLOURS), list(SHAPES), list(MOTIONS), list(BACKGROUNDS))
    numbers = torch.stack([tracks.colour, tracks.shape, tracks.motion, tracks.background], 1).tolist()
    return [Attributes(*(kind[number] for kind, number in zip(names, row, strict=True))) for row in numbers]
