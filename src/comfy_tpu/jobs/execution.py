"""Carries jobs out with a model: reads inputs, runs the stages, hands the frames to a writer.

The thread that drives the devices does nothing else: videos are encoded and uploaded by another one. Small groups run
beside each other on a CPU (`lanes.py`). On several hosts each has an executor, all are given the same jobs, and the
first one writes: they fail together, so that none of them waits in a collective for another one.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from comfy_tpu.config import SECOND_PASS, GenerationSettings, Interpolation
from comfy_tpu.errors import InvalidValueError, NotFiniteError
from comfy_tpu.families.presets import AUTO, find_preset
from comfy_tpu.jobs import opening
from comfy_tpu.jobs.batch_size import choose_rows, runs_beside
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.inputs import Inputs
from comfy_tpu.jobs.lanes import Lanes
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.outcome import CancelledError, Outcome, outcome_of_error
from comfy_tpu.jobs.request import DEFAULT_MODEL, PER_ROW_FIELDS, Request, runs_alone
from comfy_tpu.jobs.saved_steps import SavedSteps
from comfy_tpu.jobs.stages import run_stage
from comfy_tpu.jobs.writing import Row, Writer
from comfy_tpu.parallel import hosts
from comfy_tpu.pipeline import artifacts, media
from comfy_tpu.pipeline.embeddings import PromptEmbeddings, merge_embeddings
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia, follow_media
from comfy_tpu.pipeline.initial import INITIAL, read_strength
from comfy_tpu.pipeline.interpolation import Interpolator, check_interpolation, read_interpolation
from comfy_tpu.pipeline.preview_colours import LearnedColours
from comfy_tpu.pipeline.preview_images import ColourPreviews, Previews, encode_preview
from comfy_tpu.pipeline.progress import FetchPreview, ProgressCallback, ignore_progress
from comfy_tpu.pipeline.second_pass import (
    check_second_pass,
    denoise_again,
    describe_second_pass,
    read_second_pass,
)
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint
from comfy_tpu.pipeline.video import VideoPipeline

_TEXTS_MAX = 8
"""Encoded prompts that are kept. Those of Wan 2.1 have 16 MB each."""
_PROGRAMS_MAX = 300
"""Compiled programs that are kept, of about forty sizes: clients of a server choose sizes, and any number of them."""
_SHAPES_MAX = 1000
"""Shapes whose numbers of rows are remembered. Each image that a job begins with is another shape."""


class Executor:
    """Carries out jobs, in groups of equal shape."""

    def __init__(
        self,
        folder: Folder,
        *,
        batch_size: int | None = 1,
        on_outcome: Callable[[Outcome], None],
        on_progress: ProgressCallback = ignore_progress,
        learns_colours: bool = False,
        saved_steps: SavedSteps | None = None,
    ) -> None:
        """`batch_size`: the most prompts that share a step; None: as many as there is room for. `learns_colours`:
        whether the first videos of a model teach the colours of its previews, where its files do not have them.
        `saved_steps`: where the steps of jobs are saved, each by itself whatever the batch size; closed by `close`."""
        self._folder = folder
        self._saved_steps = saved_steps
        self._batch_size = batch_size
        self._on_outcome = on_outcome
        self._on_progress = on_progress
        self._pipeline: VideoPipeline | None = None
        self._model_key = ""
        self._rows_compiled: dict[str, set[int]] = {}
        """Numbers of rows that steps were compiled for, by shape."""
        self._texts: dict[tuple[str, str, str], PromptEmbeddings] = {}
        """The last encoded prompts, by shape, prompt and negative prompt: lines often differ in the seed only."""
        self._warm_shape: str | None = None
        """The shape of the last video, whose programs are therefore compiled, and whose weights are loaded."""
        self._open_jobs: dict[str, Job] = {}
        """Jobs of `run` that have neither an outcome yet nor a writer to tell it."""
        self.is_cancelled = False
        """Whether a run ended inside a group. Other hosts that were given it may wait for this one."""
        self._learns_colours = learns_colours
        self._learned: dict[str, LearnedColours] = {}
        """By the name of the model."""
        self._previews_made = 0
        self._interpolator: tuple[Interpolation, Interpolator] | None = None
        self._thread = threading.local()
        self._inputs = Inputs()
        self._lanes = Lanes(lambda: Writer(folder, on_outcome))

    @property
    def current_jobs(self) -> tuple[str, ...]:
        """The ids of the jobs that this thread works on."""
        return getattr(self._thread, "jobs", ())

    def render_previews(self, fetch: FetchPreview, wanted: Collection[str]) -> tuple[bytes, ...]:
        """As `Event.previews`, of the jobs that this thread works on; none where the model's colours are unknown. Each
        call shows the next frame of a video."""
        pipeline = self._pipeline
        assert pipeline is not None
        source = pipeline.previews or self._learned_previews(pipeline.model_name)
        if source is None:
            return ()
        previews = []
        for row, id_ in enumerate(self.current_jobs):
            if id_ not in wanted:
                previews.append(b"")
                continue
            latents = fetch(row)
            frame = self._previews_made % latents.shape[2]
            image = next(source.render(latents, range(frame, frame + 1)), None)
            previews.append(b"" if image is None else encode_preview(image))
        self._previews_made += 1
        return tuple(previews)

    def _learned_previews(self, model: str) -> Previews | None:
        learned = self._learned.get(model)
        return None if learned is None or learned.colours is None else ColourPreviews(learned.colours)

    def run(self, jobs: Sequence[Job]) -> None:
        """Carries out jobs of one shape, the last of them perhaps after it has returned. Outcomes are reported when
        their files are at their places."""
        self._open_jobs |= {job.id: job for job in jobs}
        try:
            self._run_groups(list(jobs))
        except CancelledError as error:
            self.is_cancelled = True
            self._fail_open(jobs, error)

    def _run_groups(self, waiting: list[Job]) -> None:
        while waiting:
            try:
                with hosts.failing_together(CancelledError) as facts:
                    pipeline = self._open(waiting[0].request)
                    count, is_small = self._choose_group(pipeline, waiting)
                    facts |= {"model": pipeline.model_fingerprint, "batch_size": str(count)}
            except CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - a job's error is its outcome
                is_open = self._model_key == waiting[0].request.model_key
                self._fail(waiting, error, is_of_model=isinstance(error, InvalidValueError) and not is_open)
                return
            group, waiting = waiting[:count], waiting[count:]
            shape_key = group[0].request.shape_key
            if pipeline.running.compiled_count > _PROGRAMS_MAX:
                self._forget_programs(pipeline)
            if is_small and shape_key == self._warm_shape and count <= max(self._rows_compiled[shape_key]):
                self._lanes.run_beside(functools.partial(self._run_in_lane, pipeline, group))
            else:
                self._lanes.run_alone(functools.partial(self._run_group, pipeline, group))

    def _forget_programs(self, pipeline: VideoPipeline) -> None:
        self._lanes.wait()
        pipeline.running.forget_programs()
        self._rows_compiled.clear()
        self._warm_shape = None

    def _run_in_lane(self, pipeline: VideoPipeline, jobs: Sequence[Job], writer: Writer) -> None:
        try:
            self._run_group(pipeline, jobs, writer)
        except Exception as error:  # noqa: BLE001 - CancelledError, too: nobody waits for this thread
            self._fail_open(jobs, error)

    def close(self) -> None:
        """Waits until all files are written, and frees the devices' memory."""
        self._lanes.close()
        if self._pipeline is not None:
            self._pipeline.running.unload()
            self._pipeline = None
        self._inputs.close()
        if self._saved_steps is not None:
            self._saved_steps.close()

    def _open(self, request: Request) -> VideoPipeline:
        if self._pipeline is None or self._model_key != request.model_key:
            self._lanes.wait()
            self._warm_shape = None
            if self._pipeline is not None:
                self._pipeline.running.unload()
            model = opening.choose_model(request.values)
            self._pipeline = VideoPipeline.open(
                DEFAULT_MODEL if model is None else model,
                opening.make_runtime(request.values),
                on_progress=self._on_progress,
            )
            self._model_key = request.model_key
        return self._pipeline

    def _choose_group(self, pipeline: VideoPipeline, jobs: Sequence[Job]) -> tuple[int, bool]:
        """How many of the jobs share the next steps, and whether they may run beside others."""
        values = jobs[0].request.values
        # Without what is a job's own: a bad seed fails that job, and not those that would share a step with it.
        common = {name: value for name, value in values.items() if name not in PER_ROW_FIELDS}
        # "auto" is found out when the LoRAs are opened, which others may be using now: here it counts as none.
        name = values.get("preset", AUTO)
        preset = {} if name == AUTO else find_preset(pipeline.files.presets, name, pipeline.model_name).settings
        settings = pipeline.settings(**opening.choose_settings(common, pipeline.family.card.sizes, preset))
        alone = self._saved_steps is not None or runs_alone(pipeline.family.card, values)
        most = 1 if alone else self._batch_size or choose_rows(pipeline, settings)
        rows = self._fit_compiled(jobs[0].request.shape_key, min(most, len(jobs)))
        if self._saved_steps is not None:  # of one job at a time
            return rows, False
        return rows, runs_beside(pipeline, dataclasses.replace(settings, num_videos=rows * settings.num_videos))

    def _fit_compiled(self, shape_key: str, rows: int) -> int:
        """So many rows, or fewer where a smaller program is there and more than half of a larger one would be padding:
        two images of the demo model take 0.5 s one by one, and 1.4 s in a program for eight."""
        compiled = self._rows_compiled.get(shape_key, set())
        smaller = max((each for each in compiled if each < rows), default=None)
        larger = min((each for each in compiled if each >= rows), default=None)
        return smaller if smaller is not None and larger is not None and larger > 2 * rows else rows

    def _run_group(self, pipeline: VideoPipeline, jobs: Sequence[Job], writer: Writer) -> None:
        self._thread.jobs = tuple(job.id for job in jobs)
        if "stage" in jobs[0].request.values:
            self._run_stage(pipeline, jobs[0])
            return
        started, seconds = time.monotonic(), dict[str, float]()
        rows = list[Row]()
        try:
            with hosts.failing_together(CancelledError):
                values = self._inputs.fetch(jobs[0].request.values)
                pipeline.use_loras(values.get("lora", ()), values.get("preset"))
                given = opening.read_media(values)
                opening.check_last_image(values, pipeline)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001
            self._fail(jobs, error)
            return
        for job in jobs:
            try:
                with hosts.failing_together(CancelledError):
                    settings, paths = self._check(pipeline, job, given)
                with hosts.failing_together(CancelledError):
                    rows.append(self._encode(pipeline, job, settings, paths, given))
            except CancelledError:
                raise
            except Exception as error:  # noqa: BLE001
                self._fail([job], error)
        seconds["encoding"] = time.monotonic() - started
        if not rows:
            return
        try:
            with hosts.failing_together(CancelledError):
                self._denoise_and_decode(pipeline, rows, writer, started, seconds)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001
            if len(rows) == 1:
                self._fail([rows[0].job], error)
                return
            for row in rows:  # one of them may be the reason, or there are too many for the memory
                self._run_group(pipeline, [row.job], writer)

    def _run_stage(self, pipeline: VideoPipeline, job: Job) -> None:
        started, self._warm_shape = time.monotonic(), None  # another LoRA may be in the weights afterwards
        try:
            with hosts.failing_together(CancelledError):
                values = self._inputs.fetch(job.request.values)
                pipeline.use_loras(values.get("lora", ()), values.get("preset"))
                outputs = run_stage(pipeline, values, self._folder, job.output)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001
            self._fail([job], error)
            return
        self._open_jobs.pop(job.id, None)
        self._on_outcome(Outcome(job.id, "done", tuple(outputs), seconds={"total": time.monotonic() - started}))

    def _check(
        self, pipeline: VideoPipeline, job: Job, given: GivenMedia
    ) -> tuple[GenerationSettings, tuple[str, ...]]:
        """The settings of a job, and the names of its videos, which the first host knows."""
        sizes, preset = pipeline.family.card.sizes, pipeline.preset.settings
        chosen = opening.choose_settings(job.request.values, sizes, preset)
        settings = pipeline.settings(**follow_media(chosen, given, pipeline.family.card, pipeline.defaults))
        pipeline.warn_of_preset(settings)
        settings = pipeline.settle_context(settings, given.images)
        if (second := read_second_pass(job.request.values)) is not None:
            check_second_pass(pipeline.family.card, pipeline.model_name, settings, second, given)
        self._find_interpolator(pipeline, job, settings)
        if not hosts.is_first_host():
            return settings, ()
        with self._folder.writing() as directory:
            place = self._folder.check_inside(directory, job.output)
            paths = [path.relative_to(directory) for path in media.check_output(place, settings)]
        return settings, tuple(map(str, paths))

    def _encode(
        self,
        pipeline: VideoPipeline,
        job: Job,
        settings: GenerationSettings,
        paths: tuple[str, ...],
        given: GivenMedia,
    ) -> Row:
        embeddings = self._encode_prompt(pipeline, job, settings, given)
        between = self._find_interpolator(pipeline, job, settings)
        second, first = read_second_pass(job.request.values), settings
        if second is not None:
            settings = check_second_pass(pipeline.family.card, pipeline.model_name, first, second, given)
        description = artifacts.describe(
            job.request.prompt,
            settings,
            pipeline,
            images_fingerprint=given.fingerprint,
            loras=pipeline.loras.text,
            attention_window=pipeline.attention_window,
            quantization=pipeline.quantization,
            preset=pipeline.preset.name or "",
            tiny_vae=pipeline.tiny_vae,
            second_pass="" if second is None else describe_second_pass(first, second),
            interpolation="" if between is None else between.fingerprint,
        )
        if INITIAL in embeddings.shared:
            description["strength"] = str(read_strength(embeddings.shared))
        kept = NO_MEDIA if second is None else given
        return Row(job, first, paths, embeddings, description, kept, 1 if between is None else between.factor)

    def _find_interpolator(
        self, pipeline: VideoPipeline, job: Job, settings: GenerationSettings
    ) -> Interpolator | None:
        """What makes frames between those of a job; None: nothing does. The last one is kept."""
        values = job.request.values
        chosen = read_interpolation(values.get("interpolate"), values.get("interpolation_model"))
        limits = pipeline.limits
        check_interpolation(chosen, makes_images=limits.frames_max == 1, fps=settings.fps, fps_max=limits.fps_max)
        if chosen is None:
            return None
        if self._interpolator is None or self._interpolator[0] != chosen:
            runtime = pipeline.running.runtime
            self._interpolator = chosen, Interpolator(chosen, runtime.platform, runtime.cache)
        return self._interpolator[1]

    def _encode_prompt(
        self, pipeline: VideoPipeline, job: Job, settings: GenerationSettings, given: GivenMedia
    ) -> PromptEmbeddings:
        if given:
            return pipeline.encode(job.request.prompt, settings, given)
        key = (job.request.shape_key, job.request.prompt, settings.negative_prompt)
        known = self._texts.get(key)
        if known is None:
            known = self._texts[key] = pipeline.encode(job.request.prompt, settings)
            for old in list(self._texts)[:-_TEXTS_MAX]:
                self._texts.pop(old, None)
        return known

    def _denoise_and_decode(
        self,
        pipeline: VideoPipeline,
        rows: Sequence[Row],
        writer: Writer,
        started: float,
        seconds: dict[str, float],
    ) -> None:
        shape_key = rows[0].job.request.shape_key
        # Copies of the last row make up a number that a program was compiled for: cheaper than another program. The
        # smallest one: a server's single requests are not to cost what eight did before them.
        compiled = self._rows_compiled.setdefault(shape_key, set())
        count = min((each for each in compiled if each >= len(rows)), default=len(rows))
        padded = [*rows, *[rows[-1]] * (count - len(rows))]
        settings, seeds = rows[0].settings, tuple[int, ...]()
        if count > 1:
            settings = dataclasses.replace(settings, num_videos=count)
            seeds = tuple(row.settings.seed for row in padded)
        self._thread.jobs = tuple(row.job.id for row in rows)  # without those that failed: a row of latents each
        begun = time.monotonic()
        embeddings = merge_embeddings([row.embeddings for row in padded])
        steps = self._open_steps(rows[0].job)
        try:
            latents = pipeline.denoise(embeddings, settings, seeds=seeds, checkpoint=steps)
            compiled.add(count)
            if (second := read_second_pass(rows[0].job.request.values)) is not None:  # such a job has its steps alone
                again = self._open_steps(rows[0].job, SECOND_PASS)
                given = rows[0].given
                latents, settings = denoise_again(pipeline, embeddings, latents, settings, second, given, again)
        except NotFiniteError:
            if self._saved_steps is not None:  # another attempt would go on from what is broken
                self._saved_steps.remove(rows[0].job.id)
            raise
        if steps is not None:
            rows = [dataclasses.replace(rows[0], resumed_after=steps.resumed_after)]
        for old in list(self._rows_compiled)[:-_SHAPES_MAX]:
            self._rows_compiled.pop(old, None)
        seconds["denoising"] = time.monotonic() - begun
        sound = pipeline.decode_sound(latents, settings)
        frames = self._learn_colours(
            pipeline, latents[:, :, : pipeline.family.card.latent_frames(settings)], pipeline.decode(latents, settings)
        )
        if (between := self._find_interpolator(pipeline, rows[0].job, settings)) is not None:
            frames = between.interpolate(frames)
        writer.write(rows, frames, started=started, seconds=seconds, sound=sound)
        self._warm_shape = shape_key
        for row in rows:
            self._open_jobs.pop(row.job.id, None)  # the writer tells their outcome

    def _open_steps(self, job: Job, part: str = "") -> StepCheckpoint | None:
        return None if self._saved_steps is None else self._saved_steps.open(job.id, part)

    def _learn_colours(
        self, pipeline: VideoPipeline, latents: torch.Tensor, frames: Iterator[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        if not self._learns_colours or pipeline.previews is not None:
            return frames
        learned = self._learned.setdefault(pipeline.model_name, LearnedColours())
        return learned.watch(latents, frames) if learned.is_learning else frames

    def _fail_open(self, jobs: Sequence[Job], error: Exception) -> None:
        self._fail([job for job in jobs if job.id in self._open_jobs], error)

    def _fail(self, jobs: Sequence[Job], error: Exception, *, is_of_model: bool = False) -> None:
        for job in jobs:
            self._open_jobs.pop(job.id, None)
            self._on_outcome(dataclasses.replace(outcome_of_error(job.id, error), is_of_model=is_of_model))
