"""LTX-2's guidance: up to four branches, whose weights are inputs of a step, for the video and for its sound.

diffusers adds up what each branch would change; here each row of the batch has its weight in the sum. All of them are
computed where guidance_scale is over 1, and only the prompt's otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.ltx2 import card
from comfy_tpu.families.model_family import GuidanceInputs
from comfy_tpu.families.shared.all_frames_vae import TEMPORAL_SCALE
from comfy_tpu.families.shared.first_frame import replace_first_frame
from comfy_tpu.families.shared.packed_sound import join_sound, split_sound

_SOUND_COLUMNS, _SOUND_COLUMNS_PER_SECOND = 4, 100
"""Columns of a spectrogram: of a latent, and of a second."""
_CAUSAL_OFFSET = 1
"""The first latent of a video is one frame, and that of a sound one column."""


def _perturbs(settings: GenerationSettings) -> bool:
    return max(settings.stg_scale, settings.audio_stg_scale) > 0


def _isolates(settings: GenerationSettings) -> bool:
    return max(settings.modality_scale, settings.audio_modality_scale) > 1


def extra_branches(settings: GenerationSettings) -> int:
    return _perturbs(settings) + _isolates(settings)


def settings_inputs(settings: GenerationSettings) -> dict[str, torch.Tensor]:
    """Where the tokens are in time; and of each branch, its weights and what it does without."""
    branches = ["prompt", "negative", *["perturbed"] * _perturbs(settings), *["isolated"] * _isolates(settings)]
    inputs = {
        "frame_times": _middles(settings, TEMPORAL_SCALE, card.LTX2.latent_frames(settings), settings.fps),
        "sound_times": _middles(settings, _SOUND_COLUMNS, card.LTX2.sound_tokens(settings), _SOUND_COLUMNS_PER_SECOND),
        "branch_weights": torch.tensor([list(weights) for weights in zip(*_weights(settings), strict=True)]),
        "rescale": torch.tensor(
            [[settings.guidance_rescale, settings.audio_guidance_rescale or settings.guidance_rescale]]
        ),
    }
    if _perturbs(settings):
        inputs["perturbed"] = torch.tensor([[float(name == "perturbed")] for name in branches])
        inputs["perturbed_block"] = torch.tensor([[float(settings.stg_block)]])
    if _isolates(settings):
        inputs["isolated"] = torch.tensor([[float(name == "isolated")] for name in branches])
    return inputs


def _middles(settings: GenerationSettings, scale: int, count: int, rate: float) -> torch.Tensor:
    """The middle of each latent in seconds, [1, count]."""
    ends = torch.arange(count + 1, dtype=torch.float32) * scale + _CAUSAL_OFFSET - scale
    seconds = ends.clamp(min=0) / rate
    return ((seconds[:-1] + seconds[1:]) / 2).unsqueeze(0)


def _weights(settings: GenerationSettings) -> tuple[list[float], list[float]]:
    """The weights of the branches for the video, and for the sound."""
    scales = (settings.guidance_scale, settings.stg_scale, settings.modality_scale)
    of_sound = (settings.audio_guidance_scale, settings.audio_stg_scale, settings.audio_modality_scale)
    made = []
    for guidance, perturbed, isolated in (scales, [own or video for own, video in zip(of_sound, scales, strict=True)]):
        others = [guidance - 1]
        others += [perturbed] * _perturbs(settings) + [isolated - 1] * _isolates(settings)
        made.append([1 + sum(others), *(-weight for weight in others)])
    return made[0], made[1]


def guide(velocities: Sequence[torch.Tensor], given: GuidanceInputs) -> torch.Tensor:
    prepared = given.prepared
    sizes = (prepared["frame_times"].shape[1], prepared["sound_times"].shape[1])
    latents, videos = given.latents, len(given.latents)
    if "condition" in prepared:
        latents = replace_first_frame(latents, prepared["condition"][:videos])
    branches = [split_sound(velocity, *sizes) for velocity in velocities]
    sigma = given.timestep.view(()) / 1000
    made = []
    for stream, sample in enumerate(split_sound(latents, *sizes)):
        weights = prepared["branch_weights"][::videos, stream]
        own = branches[0][stream]
        guided = sum(weight * branch[stream] for weight, branch in zip(weights.unbind(), branches, strict=True))
        assert isinstance(guided, torch.Tensor)
        clean, clean_guided = sample - sigma * own, sample - sigma * guided
        rescale = prepared["rescale"][0, stream]
        factor = rescale * _deviation(clean) / _deviation(clean_guided) + 1 - rescale
        made.append((sample - clean_guided * factor) / sigma)
    return join_sound(made[0], made[1])


def _deviation(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).std(dim=1).view(-1, *(1,) * (x.ndim - 1))
