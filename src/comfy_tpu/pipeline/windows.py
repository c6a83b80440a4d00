"""The steps of a long video: the transformer runs on windows of the model's own length, several as rows of one batch,
and their velocities are blended on the devices to that of the whole video.

One program computes every window, whatever the length of the video: which frames it gets is an input.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch

from comfy_tpu.bridge import to_device
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.context import (
    ContextWindows,
    begins_with_image,
    call_settings,
    choose_method,
    find_windows,
    seen_settings,
    window_counts,
)
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.embeddings import Embeddings
from comfy_tpu.pipeline.noise import shuffle_noise
from comfy_tpu.pipeline.step import StepPrograms, batch_rows, keeps_busy
from comfy_tpu.pipeline.step_plan import PlannedStep


def find_context(family: ModelFamily, settings: GenerationSettings, shared: Embeddings) -> ContextWindows | None:
    """The windows that the video is made by; None: whole, or in segments. `shared`: embeddings of given images."""
    with_image = begins_with_image(family.card, shared)
    return find_windows(family.card, settings, choose_method(family.card, settings, begins_with_image=with_image))


def windows_per_call(
    family: ModelFamily, settings: GenerationSettings, placement: Placement, guided: bool | None = None
) -> int:
    """Windows in a call: as many as dp divides, and more where they are too small to keep the devices busy; 1 for a
    video without windows. `guided` None: as the first steps are."""
    counts = window_counts(family.card, settings)
    if counts == (1,):
        return 1
    if guided is not None:
        settings = dataclasses.replace(settings, guidance_scale=2.0 if guided else 1.0)
    dp = placement.sizes.dp
    windows = dp // math.gcd(batch_rows(family, call_settings(family.card, settings, 1)), dp)
    while 2 * windows <= counts[-1] and not keeps_busy(
        family, call_settings(family.card, settings, windows), placement
    ):
        windows *= 2
    return windows


class WindowedVideo:
    """A long video whose velocity is computed window by window."""

    def __init__(
        self,
        family: ModelFamily,
        context: ContextWindows,
        settings: GenerationSettings,
        placement: Placement,
        shared: Embeddings,
        *,
        steps: int,
    ) -> None:
        """`steps`: those of the whole run."""
        self._family = family
        self._context = context
        self._settings = settings
        self._placement = placement
        has_keyframes = context.is_long and context.tiles is None
        self._keyframe_steps = round(settings.context_keyframes * steps) if has_keyframes else 0
        self._frame_inputs = {name: rows for name, rows in shared.items() if name in family.denoiser.frame_inputs}
        self._on_devices: dict[str, jax.Array] = {
            name: to_device(rows.expand(settings.num_videos, *rows.shape[1:]))
            for name, rows in self._frame_inputs.items()
        }

    @property
    def window_settings(self) -> GenerationSettings:
        return seen_settings(self._family.card, self._settings)

    def windows_per_call(self, guided: bool) -> int:
        return windows_per_call(self._family, self._settings, self._placement, guided)

    def first_window(self, embeddings: Embeddings) -> dict[str, torch.Tensor]:
        """Embeddings for `prepare`, in the shapes of a window."""
        length, tiles = self._context.length, self._context.tiles
        height, width = (None, None) if tiles is None else (tiles.rows.length, tiles.columns.length)
        return {
            name: rows[:, :, :length, :height, :width] if name in self._frame_inputs else rows
            for name, rows in embeddings.items()
        }

    def shuffle_noise(self, noise: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
        """The noise that the video starts from. `seeds`: of each video, or of all."""
        if self._settings.context_noise != "freenoise":
            return noise
        rows = noise.split(noise.shape[0] // len(seeds))
        return torch.cat([shuffle_noise(own, self._context, seed) for own, seed in zip(rows, seeds, strict=True)])

    def compute_velocity(
        self,
        programs: StepPrograms,
        step: PlannedStep,
        number: int,
        weights: tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]],
        prepared: Mapping[str, jax.Array],
        latents: jax.Array,
        velocity: jax.Array,
        on_call: Callable[[], None],
    ) -> jax.Array:
        """The velocity of the video at the step of this number, from 0.

        `weights`: those of the transformer alone, and with those prepared from the prompt. `velocity`: an earlier one,
        whose memory is taken over. `on_call` is called between two calls; an exception from it ends the step.
        """
        predict = functools.partial(self._predict, programs, step, weights, prepared, latents)
        if number < self._keyframe_steps:
            return self._fill_between(programs, step, weights[0], latents, predict)
        add = programs.add_windows() if self._context.tiles is None else programs.add_tiles()
        for index, (places, shares) in enumerate(self._calls(number, step.guided)):
            if index:
                on_call()
            velocity = add(
                weights[0],
                velocity=velocity,
                kept=torch.tensor(float(index > 0)),
                windows=predict(places),
                **places,
                **shares,
            )
            velocity.block_until_ready()  # so that it can be ended between two calls
        return velocity

    def _predict(
        self,
        programs: StepPrograms,
        step: PlannedStep,
        weights: tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]],
        prepared: Mapping[str, jax.Array],
        latents: jax.Array,
        places: Mapping[str, torch.Tensor],
    ) -> Any:
        """The velocities of windows at these places, [windows, n], as rows of a batch."""
        loaded, all_weights = weights
        cut = programs.gather_windows() if self._context.tiles is None else programs.gather_tiles()
        gather = functools.partial(cut, loaded, **places)
        return programs.predict_windows()(
            all_weights,
            latents=gather(video=latents),
            timestep=torch.tensor([step.timestep], dtype=torch.float32),
            guidance_scale=torch.tensor(step.guidance_scale, dtype=torch.float32),
            prepared={name: array for name, array in prepared.items() if name not in self._frame_inputs},
            frame_inputs={name: gather(video=video) for name, video in self._on_devices.items()},
            guided=step.guided,
        )

    def _fill_between(
        self,
        programs: StepPrograms,
        step: PlannedStep,
        loaded: Mapping[str, jax.Array],
        latents: jax.Array,
        predict: Callable[[Mapping[str, torch.Tensor]], Any],
    ) -> jax.Array:
        """The velocity of the video from that of its keyframes alone, which are one window."""
        keyframes = self._context.keyframes()
        before = [min(bisect.bisect(keyframes, frame), len(keyframes) - 1) - 1 for frame in range(keyframes[-1] + 1)]
        share = [
            (frame - keyframes[place]) / (keyframes[place + 1] - keyframes[place]) for frame, place in enumerate(before)
        ]
        # As many windows as in the other steps, which is the same program: all but the first count nothing.
        frames = torch.tensor([keyframes] * self.windows_per_call(step.guided), dtype=torch.int32)
        filled: Any = programs.fill_between()(
            loaded,
            windows=predict({"frames": frames}),
            video=latents,
            keyframes=frames[0],
            before=torch.tensor(before, dtype=torch.int32),
            share=torch.tensor(share, dtype=torch.float32),
            sigma=torch.tensor(step.sigma, dtype=torch.float32),
        )
        return filled

    def _calls(self, number: int, guided: bool) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
        """Places and weights of the windows of each call, [windows, n]. The last call is padded with windows that count
        nothing."""
        places, weights = _places(self._context, number)
        count = self.windows_per_call(guided)
        padding = -len(places["frames"]) % count
        for rows in places.values():
            rows += [rows[-1]] * padding
        for shares in weights.values():
            shares += [(0.0,) * len(shares[-1])] * padding
        return list(zip(_split(places, torch.int32, count), _split(weights, torch.float32, count), strict=True))


def _places(
    context: ContextWindows, number: int
) -> tuple[dict[str, list[tuple[int, ...]]], dict[str, list[tuple[float, ...]]]]:
    """The frames of each window of a step, and with tiles the rows and columns; and the weights of each of them."""
    windows = context.at(number)
    shares = context.shares(windows)
    if context.tiles is None:
        return {"frames": windows}, {"shares": shares}
    each, tiles = range(len(windows)), range(len(context.tiles))
    rows, columns = zip(*context.tiles.places(), strict=True)
    row_shares, column_shares = zip(*context.tiles.shares(), strict=True)
    return (
        {
            "frames": [windows[window] for window in each for _ in tiles],
            "rows": [rows[tile] for _ in each for tile in tiles],
            "columns": [columns[tile] for _ in each for tile in tiles],
        },
        {
            "shares": [shares[window] for window in each for _ in tiles],
            "row_shares": [row_shares[tile] for _ in each for tile in tiles],
            "column_shares": [column_shares[tile] for _ in each for tile in tiles],
        },
    )


def _split(named: Mapping[str, Sequence[Any]], dtype: torch.dtype, count: int) -> list[dict[str, torch.Tensor]]:
    """Tensors of `count` rows each."""
    tensors = {name: torch.tensor(rows, dtype=dtype).split(count) for name, rows in named.items()}
    return [dict(zip(tensors, parts, strict=True)) for parts in zip(*tensors.values(), strict=True)]
