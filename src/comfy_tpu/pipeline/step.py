"""The programs of one denoising step: inputs, prepared weights, donated arguments, and shardings.

Pipelines, plans, benchmarks, calibration and tests all make their programs here, so that a plan describes what runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.export
import numpy as np
import torch

from comfy_tpu.bridge import token_grid_scope
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.program import DeviceProgram
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import Denoiser, GuidanceInputs, ModelFamily, TokenGrid
from comfy_tpu.parallel.constraints import Axes, even_spec
from comfy_tpu.pipeline.schedule import HISTORY

MakeProgram = Callable[..., DeviceProgram]
"""(function, **options of `Program`) -> the program over one component's weights: `Component.program`, or a cached
version of it."""

_Array = TypeVar("_Array")
_BRANCHES: Axes = ("dp",)
_STATE = ("samples", "outputs")


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """The programs that denoise with one transformer."""

    denoiser: Denoiser
    make_program: MakeProgram

    def prepare(self, names: Iterable[str]) -> DeviceProgram:
        """The program that prepares a prompt, once per run. `names`: its inputs, embeddings and settings inputs."""
        axes = dict.fromkeys(names, _BRANCHES)
        return self.make_program(self.denoiser.prepare, input_axes=axes, output_axes=dict(self.denoiser.prepared_axes))

    def compute(self) -> DeviceProgram:
        """A step with the transformer."""
        return self.make_program(
            make_step(self.denoiser.predict, self.denoiser.guide, self.denoiser.token_grid),
            static=("branches",),
            donate=_STATE,
            input_axes={"prepared": _BRANCHES},
            output_axes=(),
        )

    def reuse(self) -> DeviceProgram:
        """A step without the transformer."""
        return self.make_program(reuse_step, donate=_STATE, output_axes=())


@functools.lru_cache(maxsize=64)
def make_step(
    predict: Callable[..., torch.Tensor], guide: Callable[..., torch.Tensor], token_grid: TokenGrid | None
) -> Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """A step as a function on torch tensors: the model's velocity, guidance, and the scheduler's weighted sum."""

    def predict_in_grid(module: Any, latents: torch.Tensor, *inputs: Any, **prepared: torch.Tensor) -> torch.Tensor:
        if token_grid is None:
            return predict(module, latents, *inputs, **prepared)
        frames, height, width = latents.shape[2:]
        with token_grid_scope(token_grid(module.config, (frames, height, width))):
            return predict(module, latents, *inputs, **prepared)

    def denoise_step(
        module: Any,
        samples: list[torch.Tensor],
        outputs: list[torch.Tensor],
        coefficients: torch.Tensor,
        timestep: torch.Tensor,
        guidance_scale: torch.Tensor,
        prepared: dict[str, torch.Tensor],
        branches: int,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        latents = samples[0]
        if branches > 1:
            # All branches in one batch, which dp divides between parts of the mesh.
            every = predict_in_grid(module, torch.cat((latents,) * branches), timestep, guidance_scale, **prepared)
            given = GuidanceInputs(guidance_scale, latents, timestep, prepared)
            velocity = guide(every.float().chunk(branches), given)
        else:
            velocity = predict_in_grid(module, latents, timestep, guidance_scale, **prepared).float()
        return _advance(samples, [velocity, *outputs[:-1]], coefficients)

    return denoise_step


def reuse_step(
    module: Any,
    samples: list[torch.Tensor],
    outputs: list[torch.Tensor],
    coefficients: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A step that uses the last velocity, scaled, instead of a new one."""
    return _advance(samples, [scale * outputs[0], *outputs[:-1]], coefficients)


def _advance(
    samples: list[torch.Tensor], outputs: list[torch.Tensor], coefficients: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    known = torch.stack((*samples, *outputs))
    after = (coefficients.view(2 * HISTORY, *(1,) * samples[0].ndim) * known).sum(0)
    return [after, *samples[:-1]], outputs


def split_prepared(prepared: Mapping[str, _Array]) -> tuple[dict[str, _Array], dict[str, _Array]]:
    """The outputs of `prepare` that are weights of the transformer, and those that are inputs of a step."""
    weights = {name: array for name, array in prepared.items() if "." in name}
    return weights, {name: array for name, array in prepared.items() if name not in weights}


def is_guided(family: ModelFamily, settings: GenerationSettings) -> bool:
    """Whether the first transformer's steps compute several branches."""
    return family.card.is_guided(settings.guidance_scale)


def count_branches(family: ModelFamily, settings: GenerationSettings, *, guided: bool) -> int:
    """Branches of a step: the prompt's; and if it is guided, that of the negative prompt and the family's own."""
    return 2 + family.denoiser.extra_branches(settings) if guided else 1


def batch_rows(family: ModelFamily, settings: GenerationSettings) -> int:
    """Rows of a step's batch: videos, times the branches of guidance."""
    return settings.num_videos * count_branches(family, settings, guided=is_guided(family, settings))


def latent_shape(family: ModelFamily, channels: int, settings: GenerationSettings) -> tuple[int, ...]:
    """With the sound, if the model makes one: families/shared/packed_sound.py."""
    return (settings.num_videos, channels, *family.card.latent_size(settings))


@dataclasses.dataclass(frozen=True)
class ExportedStep:
    """The programs of a step, lowered for a machine that need not be attached."""

    prepare: jax.export.Exported
    compute: jax.export.Exported
    prepared: dict[str, jax.ShapeDtypeStruct]
    """The outputs of `prepare`, as they lie on the mesh."""
    latents: tuple[int, ...]


def abstract_embeddings(
    family: ModelFamily, config: Config, settings: GenerationSettings
) -> dict[str, jax.ShapeDtypeStruct]:
    """The inputs of `prepare` for a transformer of this configuration, without their data."""
    batch = batch_rows(family, settings)
    shapes = family.text.embedding_shapes(config, settings)
    inputs = family.denoiser.settings_inputs(settings)
    return {name: jax.ShapeDtypeStruct((batch, *shape), np.dtype("bfloat16")) for name, shape in shapes.items()} | {
        name: jax.ShapeDtypeStruct((batch, *row.shape[1:]), np.dtype("float32")) for name, row in inputs.items()
    }


def abstract_state(latents: tuple[int, ...]) -> dict[str, Any]:
    """The inputs of a computed step besides the prompt, without their data."""
    float32 = np.dtype("float32")
    latent = jax.ShapeDtypeStruct(latents, float32)
    return {
        "samples": [latent] * HISTORY,
        "outputs": [latent] * HISTORY,
        "coefficients": jax.ShapeDtypeStruct((2 * HISTORY,), float32),
        "timestep": jax.ShapeDtypeStruct((1,), float32),
        "guidance_scale": jax.ShapeDtypeStruct((), float32),
    }


def place_prepared(
    component: Component, denoiser: Denoiser, shapes: Mapping[str, Any]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The outputs of `prepare` as they lie on the mesh, from their shapes and dtypes."""
    placement, axes = component.placement, denoiser.prepared_axes
    return {
        name: jax.ShapeDtypeStruct(
            shape.shape,
            shape.dtype,
            sharding=placement.sharding(*even_spec(axes.get(name, _BRANCHES), shape.shape, placement)),
        )
        for name, shape in shapes.items()
    }


def export_step(
    component: Component,
    family: ModelFamily,
    settings: GenerationSettings,
    embeddings: Mapping[str, jax.ShapeDtypeStruct],
    latent_channels: int,
    *,
    platform: str = "tpu",
) -> ExportedStep:
    """Lowers the programs of a step. `embeddings`: those of `abstract_embeddings`, and of given images."""
    programs = StepPrograms(family.denoiser, component.program)
    weights: dict[str, jax.ShapeDtypeStruct] = component.abstract_weights()
    prepare = programs.prepare(embeddings).export(platform, weights, **embeddings)
    prepared = place_prepared(component, family.denoiser, jax.tree.unflatten(prepare.out_tree, prepare.out_avals))
    prompt_weights, inputs = split_prepared(prepared)
    shape = latent_shape(family, latent_channels, settings)
    compute = programs.compute().export(
        platform,
        {**weights, **prompt_weights},
        **abstract_state(shape),
        prepared=inputs,
        branches=count_branches(family, settings, guided=is_guided(family, settings)),
    )
    return ExportedStep(prepare, compute, prepared, shape)
