"""The loop over the steps: one program for every step, latents on the devices throughout."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import torch

from comfy_tpu.bridge import to_device, to_host
from comfy_tpu.config import GenerationSettings
from comfy_tpu.parallel.global_arrays import fetch_global
from comfy_tpu.pipeline.checks import check_finite
from comfy_tpu.pipeline.embeddings import Embeddings, PromptEmbeddings
from comfy_tpu.pipeline.initial import INITIAL, without_initial
from comfy_tpu.pipeline.noise import image_noise, initial_noise, sound_noise
from comfy_tpu.pipeline.padding import merge_padding
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.schedule import HISTORY
from comfy_tpu.pipeline.step import StepPrograms, count_branches, split_prepared, step_shape
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint
from comfy_tpu.pipeline.step_plan import Plan, PlannedStep
from comfy_tpu.pipeline.windows import WindowedVideo, find_context

logger = logging.getLogger(__name__)

State = tuple[list[jax.Array], list[jax.Array]]
"""The last samples and velocities, newest first."""


def denoise_steps(
    running: RunningModel,
    plan: Plan,
    embeddings: PromptEmbeddings,
    settings: GenerationSettings,
    seeds: Sequence[int] = (),
    checkpoint: StepCheckpoint | None = None,
) -> Generator[State, None, None]:
    """Yields the state after each step; the next step takes over its memory. `seeds`: those of the rows, where each
    has its own. Where `checkpoint` has a state, that one is yielded first, and the steps before it are not computed."""
    video = _windowed_video(running, embeddings, settings, len(plan))
    if video is None:
        _warn_of_idle_devices(running, plan, settings)
    first = _first_sample(running, plan, settings, embeddings.shared, seeds, video)
    # Put, not made on the devices: that would be a program to compile.
    samples: list[Any] = [to_device(first), *(to_device(torch.zeros_like(first)) for _ in range(HISTORY - 1))]
    outputs: list[Any] = [to_device(torch.zeros_like(first)) for _ in range(HISTORY)]
    card = running.family.card
    front = first.shape[2] - card.latent_size(settings)[0]
    shown = slice(front, front + card.latent_frames(settings))
    begin, size = 0, running.size
    if checkpoint is not None and (restored := checkpoint.restore(first)) is not None:
        begin, samples, outputs = restored[0], to_device(restored[1]), to_device(restored[2])
        running.report("denoising", "", begin, len(plan), size=size)
        yield samples, outputs
    done = begin

    def report_again() -> None:
        """Reports the steps that are done, so that a run may also be cancelled within one."""
        running.report("denoising", "", done, len(plan), size=size)

    def stop_if_asked() -> None:
        if checkpoint is not None:
            checkpoint.stop_if_asked(done, samples, outputs)

    def saving() -> contextlib.AbstractContextManager[None]:
        """Around reports between two steps, which may cancel the run."""
        return (
            contextlib.nullcontext() if checkpoint is None else checkpoint.saving_if_cancelled(done, samples, outputs)
        )

    # Another prompt is other inputs of the same programs. Steps that are left out count: a prompt of the first half is
    # over where the other half of the steps is run.
    count = settings.num_inference_steps
    prompts = [embeddings.at(index / count) for index in range(count - len(plan), count)]
    left = list(zip(plan, prompts, strict=True))[begin:]
    runs = itertools.groupby(left, lambda pair: _run_key(*pair))
    for (number, guided, *_), run in runs:
        steps, (current, *_) = zip(*run, strict=True)
        programs = running.step_programs(number)
        transformer = running.family.denoiser.transformers[number]
        watched = (
            contextlib.nullcontext() if checkpoint is None else _stopping_while_loading(running, saving, stop_if_asked)
        )
        with watched, running.weights(transformer) as loaded:
            with jax.profiler.TraceAnnotation("prepare prompt"):
                branches = count_branches(running.family, settings, guided=guided)
                rows = _prompt_rows(running, current, branches, settings, video)
                prompt_weights, prepared = split_prepared(programs.prepare(rows)(loaded, **rows))
            weights = {**loaded, **prompt_weights}
            if done == begin:
                report_again()
            for step in steps:
                with jax.profiler.StepTraceAnnotation("denoising step", step_num=done + 1):
                    if video is None or step.reused:
                        state = (samples, outputs)
                        samples, outputs = _advance(programs, step, loaded, weights, prepared, state, branches)
                    else:
                        velocity = video.compute_velocity(
                            programs, step, done, (loaded, weights), prepared, samples[0], outputs.pop(), report_again
                        )
                        coefficients = torch.from_numpy(step.coefficients)
                        given = {"samples": samples, "outputs": outputs, "coefficients": coefficients}
                        samples, outputs = programs.advance()(loaded, **given, velocity=velocity)
                    # So that a step that is reported is done, and Ctrl-C is heard between two.
                    samples[0].block_until_ready()
                done += 1
                if done == 1:  # broken weights show at once: 49 steps later would be minutes
                    check_finite("the first step", {"latents": to_host(samples[0])}, running.dtype_name)
                preview = functools.partial(_predict_video, samples[1], outputs[0], step.sigma, frames=shown)
                with saving():
                    running.report("denoising", "", done, len(plan), size=size, preview=preview, reused=step.reused)
                if checkpoint is not None:
                    checkpoint.after_step(done, samples, outputs)
                yield samples, outputs
            # The keys and values of two branches are not kept beside those of one.
            del weights, prompt_weights, prepared


@contextlib.contextmanager
def _stopping_while_loading(
    running: RunningModel,
    saving: Callable[[], contextlib.AbstractContextManager[None]],
    stop_if_asked: Callable[[], None],
) -> Iterator[None]:
    """Lets a run be stopped while weights are loaded: 28 GB of a second transformer take longer than the half minute
    that a spot machine has left. Not while a step is computed, which has taken over the state's memory."""
    report = running.on_progress

    def report_and_stop(progress: Progress) -> None:
        with saving() if progress.stage == "loading" else contextlib.nullcontext():
            report(progress)
        if progress.stage == "loading":
            stop_if_asked()

    running.on_progress = report_and_stop
    try:
        yield
    finally:
        running.on_progress = report


def _run_key(step: PlannedStep, prompts: PromptEmbeddings) -> tuple[int, bool, int, int]:
    """Equal for neighbouring steps that one preparation serves."""
    return step.transformer, step.guided, id(prompts.positive), id(prompts.negative)


def _first_sample(
    running: RunningModel,
    plan: Plan,
    settings: GenerationSettings,
    shared: Embeddings,
    seeds: Sequence[int],
    video: WindowedVideo | None,
) -> torch.Tensor:
    shapes = {name: tuple(rows.shape) for name, rows in shared.items()}
    shape = step_shape(running.family, running.files.latent_channels, settings, shapes)
    if INITIAL in shared and running.family.card.starts_from_image and not seeds:
        noise = image_noise(shape, settings.seed)[1]
    else:
        rows = [(shape, settings.seed)] if not seeds else [((1, *shape[1:]), seed) for seed in seeds]
        noise = torch.cat([_draw_noise(running, settings, each, seed) for each, seed in rows])
    if video is not None:
        noise = video.shuffle_noise(noise, seeds or (settings.seed,))
    if INITIAL not in shared:
        return noise
    sigma = plan.steps[0].sigma
    return sigma * noise + (1 - sigma) * _initial(running, shared, shape)


def _initial(running: RunningModel, shared: Embeddings, shape: tuple[int, ...]) -> torch.Tensor:
    """The latents to start from, behind those of reference images where a sample of this shape begins with them."""
    initial, media = shared[INITIAL], running.family.media
    front = shape[2] - initial.shape[2]
    if not front:
        return initial
    assert media is not None
    references = shared[media.frames_from][:, : shape[1], :front]
    return torch.cat((references.expand(len(initial), -1, -1, -1, -1), initial), dim=2)


def _draw_noise(running: RunningModel, settings: GenerationSettings, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The noise that diffusers draws for this seed."""
    card, sound = running.family.card, running.family.sound
    if sound is None:
        return initial_noise(shape, seed)
    channels, bins = sound.latent_shape(running.files.config(sound.vae))
    video = (*shape[:2], card.latent_frames(settings), *shape[3:])
    return sound_noise(video, (shape[0], channels, card.sound_tokens(settings), bins), seed)


def _windowed_video(
    running: RunningModel, embeddings: PromptEmbeddings, settings: GenerationSettings, steps: int
) -> WindowedVideo | None:
    given = without_initial(embeddings.shared)
    context = find_context(running.family, settings, given)
    if context is None:
        return None
    return WindowedVideo(running.family, context, settings, running.step_placement, given, steps=steps)


def _prompt_rows(
    running: RunningModel,
    embeddings: PromptEmbeddings,
    branches: int,
    settings: GenerationSettings,
    video: WindowedVideo | None,
) -> dict[str, torch.Tensor]:
    """What is prepared for the steps: rows of the prompt and, with guidance, of the negative prompt and of the branches
    that the family adds, which read the prompt. With windows, a row for each of a call."""
    denoiser = running.family.denoiser
    inputs = denoiser.settings_inputs(settings if video is None else video.window_settings)
    given = without_initial(embeddings.shared)
    shared = given if video is None else video.first_window(given)
    copies = 1 if video is None else video.windows_per_call(branches > 1)
    negative = embeddings.positive if embeddings.negative is None else embeddings.negative
    prompts = [embeddings.positive, negative, *[embeddings.positive] * (branches - 2)][:branches]
    constants = {name: torch.full_like(shared[name], value) for name, value in denoiser.negative_values.items()}
    named = [
        {
            **prompt,
            **shared,
            **{name: row[number : number + 1] if len(row) > 1 else row for name, row in inputs.items()},
            **(constants if number == 1 else {}),
        }
        for number, prompt in enumerate(prompts)
    ]

    def expand(row: torch.Tensor) -> torch.Tensor:
        videos = row.expand(settings.num_videos, *row.shape[1:])
        return videos if copies == 1 else videos.repeat(copies, *(1,) * (row.ndim - 1))

    rows = {name: torch.cat([expand(branch[name]) for branch in named]) for name in named[0]}
    return rows | merge_padding(rows["text"]) if denoiser.merges_padding and running.skips_padding else rows


def _advance(
    programs: StepPrograms,
    step: PlannedStep,
    loaded: dict[str, jax.Array],
    weights: dict[str, jax.Array],
    prepared: dict[str, jax.Array],
    state: State,
    branches: int,
) -> State:
    """Runs one step. `weights` are the transformer's and those that were prepared from the prompt."""
    samples, outputs = state
    given = {"samples": samples, "outputs": outputs, "coefficients": torch.from_numpy(step.coefficients)}
    if step.scale is not None:
        # Without the prompt, whose shape would make it another program where guidance ends.
        scale = torch.tensor(step.scale, dtype=torch.float32)
        after: Any = programs.reuse()(loaded, **given, scale=scale)
    else:
        after = programs.compute()(
            weights,
            **given,
            timestep=torch.tensor([step.timestep], dtype=torch.float32),
            guidance_scale=torch.tensor(step.guidance_scale, dtype=torch.float32),
            prepared=prepared,
            branches=branches,
        )
    return after[0], after[1]


def _predict_video(
    sample: jax.Array, velocity: jax.Array, sigma: float, row: int = 0, *, frames: slice
) -> torch.Tensor:
    """The latents of a video without noise, as the velocity predicts them: 19 MB at 1280×720×81. `frames`: those of the
    video, without references before it and its sound behind it."""
    # From this process's own copies: the others may not look, and would not take part in a collective.
    arrays = (fetch_global(array) for array in (sample, velocity))
    return to_host(_subtract_noise(*arrays, sigma, row))[:, :, frames]


@jax.jit
def _subtract_noise(sample: jax.Array, velocity: jax.Array, sigma: float, row: int) -> jax.Array:
    """One program for all rows and noise levels of a shape, not one for each operation."""
    sample, velocity = (jax.lax.dynamic_slice_in_dim(array, row, 1) for array in (sample, velocity))
    return sample - sigma * velocity


def _warn_of_idle_devices(running: RunningModel, plan: Plan, settings: GenerationSettings) -> None:
    if plan.guided and plan.unguided and settings.num_videos % running.step_placement.sizes.dp:
        logger.warning(
            "guidance_until=%g saves no time on a mesh with dp=%d, which divides two branches but not one; choose a "
            "mesh with dp=1",
            settings.guidance_until,
            running.step_placement.sizes.dp,
            extra={"field": "guidance_until"},
        )
