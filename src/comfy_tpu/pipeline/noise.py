"""The noise that denoising starts from, drawn on the host, so that a seed gives the same noise on every device."""

from __future__ import annotations

import torch

from comfy_tpu.families.context import ContextWindows
from comfy_tpu.families.shared.packed_sound import join_sound


def initial_noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The noise that diffusers draws for this seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def sound_noise(video: tuple[int, ...], sound: tuple[int, ...], seed: int) -> torch.Tensor:
    """The noise of latents of a video and its sound, which diffusers draws after it, as one array. `sound`: videos,
    channels, tokens, and bins of frequency."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(video, generator=generator)
    return join_sound(frames, torch.randn(sound, generator=generator).transpose(1, 2).flatten(2))


def image_noise(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise for image-to-image: for the sample of the image's latents, which diffusers draws first, and for
    denoising."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, *shape[1:]), generator=generator), torch.randn(shape, generator=generator)


def shuffle_noise(noise: torch.Tensor, context: ContextWindows, seed: int) -> torch.Tensor:
    """FreeNoise: frames behind the first window repeat the noise of earlier ones, shuffled as ComfyUI does for this
    seed."""
    noise, generator = noise.clone(), torch.Generator().manual_seed(seed)
    step = context.length - context.overlap
    for start in range(0, context.frames - context.length, step):
        place = start + context.length
        order = torch.randperm(min(step, context.frames - place), generator=generator) + start
        noise[:, :, place : place + len(order)] = noise[:, :, order]
    return noise
