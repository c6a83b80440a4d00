"""The programs of one denoising step: inputs, prepared weights, donated arguments, and shardings.

Pipelines, plans, benchmarks, calibration and tests all make their programs here, so that a plan describes what runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
from comfy_tpu.families.context import call_settings
from comfy_tpu.families.model_family import Denoiser, GuidanceInputs, ModelFamily, TokenGrid
from comfy_tpu.parallel.constraints import Axes, even_spec
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.schedule import HISTORY
from comfy_tpu.pipeline.tiles import add_tiles, gather_tiles

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

    def gather_windows(self) -> DeviceProgram:
        """Windows of a long video's latents, or of other frames, as rows of a batch."""
        return self.make_program(gather_windows, output_axes=())

    def predict_windows(self) -> DeviceProgram:
        """The transformer on windows. Its inputs have the same shapes whatever the length of the video."""
        return self.make_program(
            make_window_step(self.denoiser.predict, self.denoiser.guide, self.denoiser.token_grid),
            static=("guided",),
            input_axes={"prepared": _BRANCHES},
            output_axes=(),
        )

    def add_windows(self) -> DeviceProgram:
        """Adds the velocities of windows to that of the video."""
        return self.make_program(add_windows, donate=("velocity",), output_axes=())

    def gather_tiles(self) -> DeviceProgram:
        """Tiles of windows, as rows of a batch."""
        return self.make_program(gather_tiles, output_axes=())

    def add_tiles(self) -> DeviceProgram:
        """Adds the velocities of tiles to that of the whole."""
        return self.make_program(add_tiles, donate=("velocity",), output_axes=())

    def fill_between(self) -> DeviceProgram:
        """The velocity of a video from that of its keyframes."""
        return self.make_program(fill_between, output_axes=())

    def advance(self) -> DeviceProgram:
        """A step with a velocity that was computed before."""
        return self.make_program(advance_step, donate=(*_STATE, "velocity"), output_axes=())


@functools.lru_cache(maxsize=64)
def make_step(
    predict: Callable[..., torch.Tensor], guide: Callable[..., torch.Tensor], token_grid: TokenGrid | None
) -> Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """A step as a function on torch tensors: the model's velocity, guidance, and the scheduler's weighted sum."""
    predict_guided = _make_guided(predict, guide, token_grid)

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
        velocity = predict_guided(module, samples[0], timestep, guidance_scale, prepared, branches)
        return _advance(samples, [velocity, *outputs[:-1]], coefficients)

    return denoise_step


@functools.lru_cache(maxsize=64)
def make_window_step(
    predict: Callable[..., torch.Tensor], guide: Callable[..., torch.Tensor], token_grid: TokenGrid | None
) -> Callable[..., torch.Tensor]:
    """The guided velocity of windows, each of which is a video of its own for the model."""
    predict_guided = _make_guided(predict, guide, token_grid)

    def predict_windows(
        module: Any,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        guidance_scale: torch.Tensor,
        prepared: dict[str, torch.Tensor],
        frame_inputs: dict[str, torch.Tensor],
        guided: bool,
    ) -> torch.Tensor:
        """`frame_inputs`: inputs of `predict` that were gathered like the latents, the same for both branches."""
        rows = {name: torch.cat((rows, rows)) if guided else rows for name, rows in frame_inputs.items()}
        return predict_guided(module, latents, timestep, guidance_scale, {**prepared, **rows}, 2 if guided else 1)

    return predict_windows


def _make_guided(
    predict: Callable[..., torch.Tensor], guide: Callable[..., torch.Tensor], token_grid: TokenGrid | None
) -> Callable[..., torch.Tensor]:
    def predict_in_grid(module: Any, latents: torch.Tensor, *inputs: Any, **prepared: torch.Tensor) -> torch.Tensor:
        if token_grid is None:
            return predict(module, latents, *inputs, **prepared)
        frames, height, width = latents.shape[2:]
        with token_grid_scope(token_grid(module.config, (frames, height, width))):
            return predict(module, latents, *inputs, **prepared)

    def predict_guided(
        module: Any,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        guidance_scale: torch.Tensor,
        prepared: Mapping[str, torch.Tensor],
        branches: int,
    ) -> torch.Tensor:
        if branches == 1:
            return predict_in_grid(module, latents, timestep, guidance_scale, **prepared).float()
        # All branches in one batch, which dp divides between parts of the mesh.
        every = predict_in_grid(module, torch.cat((latents,) * branches), timestep, guidance_scale, **prepared)
        return guide(every.float().chunk(branches), GuidanceInputs(guidance_scale, latents, timestep, prepared))

    return predict_guided


def gather_windows(module: Any, video: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """[videos, channels, all frames, …] and the frames of each window, [windows, n] -> [windows · videos, channels, n,
    …]."""
    parts = video.index_select(2, frames.flatten()).unflatten(2, tuple(frames.shape))
    return parts.permute(2, 0, 1, *range(3, parts.ndim)).flatten(0, 1)


def add_windows(
    module: Any,
    velocity: torch.Tensor,
    kept: torch.Tensor,
    windows: torch.Tensor,
    frames: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """`kept` times the video's velocity (0: it is that of an earlier step), with those of windows added.

    `windows` as in `gather_windows`; `shares`: their weights, [windows, n].
    """
    count, length = frames.shape
    parts = windows.unflatten(0, (count, -1)) * shares.view(count, 1, 1, length, 1, 1)
    parts = parts.permute(1, 2, 0, *range(3, parts.ndim)).flatten(2, 3)  # [videos, channels, windows · n, …]
    return (kept * velocity).index_add(2, frames.flatten(), parts)


def fill_between(
    module: Any,
    windows: torch.Tensor,
    video: torch.Tensor,
    keyframes: torch.Tensor,
    before: torch.Tensor,
    share: torch.Tensor,
    sigma: torch.Tensor,
) -> torch.Tensor:
    """The velocity with which each frame between two keyframes comes to lie between what is predicted for them.

    `windows`: velocities as in `gather_windows`, of which the first window, `keyframes` [n], counts. `before`: for each
    frame of the video, the place of the last keyframe up to it, n - 2 at most; `share`: the weight of the next one.
    """

    def spread(parts: torch.Tensor) -> torch.Tensor:
        first, second = parts.index_select(2, before), parts.index_select(2, before + 1)
        weight = share.view(-1, 1, 1)
        return (1 - weight) * first + weight * second

    # Predicted is x - sigma v. Of a keyframe itself the second term is 0.
    shown = video.index_select(2, keyframes)
    return spread(windows[: len(video)]) + (video - spread(shown)) / sigma


def advance_step(
    module: Any,
    samples: list[torch.Tensor],
    outputs: list[torch.Tensor],
    coefficients: torch.Tensor,
    velocity: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A step with a velocity that was computed before. `outputs`: those that are still needed beside it."""
    return _advance(samples, [velocity, *outputs], coefficients)


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
    # Not the sum of a stack, for which XLA's reduction on a CPU takes 2 ms of 43: 6 × 5,120 values of the demo model.
    first, *others = (weight * known for weight, known in zip(coefficients, (*samples, *outputs), strict=True))
    return [sum(others, first), *samples[:-1]], outputs


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


BUSY_TOKENS = 8192
"""Tokens per device with which matrix products are as fast as they get. A further row in the same step then only makes
the step longer."""
_BUSY_TOKENS_CPU = 512
"""On a CPU. Processor seconds a video of the demo model, 160 tokens, on an ARM Neoverse N1: 2.67 alone, 2.52 in rows of
2, 2.44 of 4, 2.45 of 8."""


def keeps_busy(family: ModelFamily, settings: GenerationSettings, placement: Placement) -> bool:
    """Whether a step of these settings has tokens enough for its devices."""
    busy = _BUSY_TOKENS_CPU if placement.platform == "cpu" else BUSY_TOKENS
    return count_tokens(family, settings) / placement.sizes.device_count >= busy


def count_tokens(family: ModelFamily, settings: GenerationSettings) -> float:
    """Those of a step: about as many as there are patches of 2×2 latents, which most models have."""
    return batch_rows(family, settings) * math.prod(family.card.latent_size(settings)) / 4


def latent_shape(family: ModelFamily, channels: int, settings: GenerationSettings) -> tuple[int, ...]:
    """With the sound, if the model makes one: families/shared/packed_sound.py."""
    return (settings.num_videos, channels, *family.card.latent_size(settings))


def step_shape(
    family: ModelFamily, channels: int, settings: GenerationSettings, embeddings: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of a step's latents, with the frames of reference images before those of the result. `embeddings`:
    shapes by name, with or without a batch dimension."""
    shape = latent_shape(family, channels, settings)
    source = embeddings.get(family.media.frames_from) if family.media is not None else None
    return shape if source is None else (*shape[:2], source[-3], *shape[3:])


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
    windows: int | None = None,
) -> ExportedStep:
    """Lowers the programs of a step. `embeddings`: those of `abstract_embeddings`, and of given images.

    `windows`: the number in a call, for a long video; `embeddings` are then those of such a call.
    """
    programs = StepPrograms(family.denoiser, component.program)
    weights: dict[str, jax.ShapeDtypeStruct] = component.abstract_weights()
    prepare = programs.prepare(embeddings).export(platform, weights, **embeddings)
    prepared = place_prepared(component, family.denoiser, jax.tree.unflatten(prepare.out_tree, prepare.out_avals))
    prompt_weights, inputs = split_prepared(prepared)
    shape = step_shape(family, latent_channels, settings, {name: each.shape for name, each in embeddings.items()})
    guided = is_guided(family, settings)
    every = {**weights, **prompt_weights}
    if windows is None:
        branches = count_branches(family, settings, guided=guided)
        compute = programs.compute().export(
            platform, every, **abstract_state(shape), prepared=inputs, branches=branches
        )
        return ExportedStep(prepare, compute, prepared, shape)
    call = abstract_state(latent_shape(family, latent_channels, call_settings(family.card, settings, windows)))
    compute = programs.predict_windows().export(
        platform,
        every,
        latents=call["samples"][0],
        timestep=call["timestep"],
        guidance_scale=call["guidance_scale"],
        prepared=inputs,
        frame_inputs={},
        guided=guided,
    )
    return ExportedStep(prepare, compute, prepared, shape)
