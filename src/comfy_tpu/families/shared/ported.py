"""What families that `comfy-tpu port new` wrote have in common: diffusers' own modules, called as its pipelines do."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import SCHEDULER_FILE, Config
from comfy_tpu.families.model_family import SchedulerFactory


def module_of(class_name: str, known: Config | None = None) -> Callable[[Config], torch.nn.Module]:
    """Builds a model of diffusers from its configuration.

    `known`: switches of the configuration, as they were when the family was written. With others the pipeline may call
    the model in another way, and that model is refused.
    """

    def build(config: Config) -> torch.nn.Module:
        import diffusers

        model_class: Any = getattr(diffusers, class_name)
        for name, value in (known or {}).items():
            if config.get(name, value) != value:
                raise UnsupportedError(
                    f"the configuration of {class_name} has {name}={config[name]}, and this family was written for "
                    f"{value}; write one from that model: comfy-tpu port new NAME --from ITS_DIRECTORY"
                )
        built: torch.nn.Module = model_class.from_config(dict(config))
        return built

    return build


def scheduler_of(class_name: str, config: Config) -> SchedulerFactory:
    """A scheduler of diffusers with these facts. It has no flow shift: settings.flow_shift does nothing."""

    def scheduler(settings: GenerationSettings) -> Any:
        import diffusers

        made = getattr(diffusers, class_name)(**config)
        made.set_timesteps(settings.num_inference_steps)
        return made

    return scheduler


def own_text_length(read: Callable[[str], Config]) -> dict[str, int]:
    """How many tokens of text a transformer is made for, where it says so."""
    length = read("transformer/config.json").get("max_text_seq_length")
    return {"max_sequence_length": length} if isinstance(length, int) else {}


def own_scheduler(name: str, class_name: str) -> Callable[[Callable[[str], Config]], Mapping[str, SchedulerFactory]]:
    """Under this name the scheduler of a model's own scheduler_config.json, which must be of the class seen here."""

    def read_own(read: Callable[[str], Config]) -> Mapping[str, SchedulerFactory]:
        config = read(SCHEDULER_FILE)
        found = config.get("_class_name", class_name)
        if found != class_name:
            raise UnsupportedError(
                f"{SCHEDULER_FILE} describes a {found}, and this family was written for a {class_name}; write one "
                "from that model: comfy-tpu port new NAME --from ITS_DIRECTORY"
            )
        known = {key: value for key, value in config.items() if not key.startswith("_")}
        return {name: scheduler_of(class_name, known)} if known else {}

    return read_own


def in_vae_scale(latents: torch.Tensor, statistics: tuple[list[float], list[float]]) -> torch.Tensor:
    """From the transformer's scale; [batch, channels, frames, height, width] both."""
    mean, deviation = (torch.tensor(each, device=latents.device).view(1, -1, 1, 1, 1) for each in statistics)
    return latents * deviation + mean


def as_frames(pixels: torch.Tensor) -> torch.Tensor:
    """[batch, 3, (frames,) height, width] in -1..1 -> [batch, frames, height, width, 3] in 0..1."""
    pixels = pixels.unsqueeze(2) if pixels.ndim == 4 else pixels
    return pixels.float().clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 4, 1)


def by_pipeline(class_name: str, method: str, module: Any, facts: Config, *arguments: Any) -> Any:
    """What a pipeline of diffusers works out by a method of its own, which reads `facts` and the transformer of it."""
    import diffusers

    pipeline = types.SimpleNamespace(transformer=module, **facts)
    return getattr(getattr(diffusers, class_name), method)(pipeline, *arguments)


def unexplained(what: str) -> Any:
    """Stands where a pipeline was seen to do something that nothing explained."""
    raise NotImplementedError(
        f"{what}: diffusers' pipeline computes it in a way that `comfy-tpu port new` did not find; read that pipeline "
        "and write it here"
    )
