"""Carries jobs out with a model: reads inputs, runs the stages, hands the frames to a writer.

The thread that drives the devices does nothing else: inputs are fetched before, videos are encoded and uploaded after
it, each in a thread of its own. On several hosts each has an executor, all are given the same jobs, and the first one
writes: they fail together, so that none of them waits in a collective for another one.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.jobs import opening
from comfy_tpu.jobs.batch_size import choose_rows
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.inputs import Inputs
from comfy_tpu.jobs.ledger import Job, OutputFile
from comfy_tpu.jobs.outcome import CancelledError, Outcome, outcome_of_error
from comfy_tpu.jobs.request import DEFAULT_MODEL, PER_ROW_FIELDS, Request
from comfy_tpu.parallel import hosts
from comfy_tpu.pipeline import artifacts, media
from comfy_tpu.pipeline.frame_names import frame_name_pattern
from comfy_tpu.pipeline.images import fingerprint
from comfy_tpu.pipeline.init_image import InitImage
from comfy_tpu.pipeline.progress import ProgressCallback, ignore_progress
from comfy_tpu.pipeline.text import PromptEmbeddings, merge_embeddings
from comfy_tpu.pipeline.video import VideoPipeline

_CHUNKS_AHEAD = 2
"""Decoded parts of a video that may wait for the writer."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """A job on its way, with what only it has."""

    job: Job
    settings: GenerationSettings
    paths: tuple[str, ...]
    """Of its videos, inside the directory."""
    embeddings: PromptEmbeddings
    metadata: Mapping[str, str]


@dataclasses.dataclass
class _Writing:
    """Rows whose frames are being written."""

    rows: Sequence[_Row]
    started: float
    chunks: queue.Queue[torch.Tensor | BaseException | None]
    seconds: dict[str, float]
    is_decoded: bool = False
    """Whether the last chunk was taken: nothing more comes."""

    def take_chunks(self) -> Iterator[torch.Tensor]:
        while (chunk := self.chunks.get()) is not None:
            if isinstance(chunk, BaseException):
                self.is_decoded = True
                raise _DecodeError from chunk
            yield chunk
        self.is_decoded = True


class Executor:
    """Carries out jobs, one group of equal shape after the other, in the thread that calls `run`."""

    def __init__(
        self,
        folder: Folder,
        *,
        batch_size: int | None = 1,
        on_outcome: Callable[[Outcome], None],
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        """`batch_size`: the most prompts that share a step; None: as many as there is room for."""
        self._folder = folder
        self._batch_size = batch_size
        self._on_outcome = on_outcome
        self._on_progress = on_progress
        self._pipeline: VideoPipeline | None = None
        self._model_key = ""
        self._rows_used: dict[str, int] = {}
        """Rows of the steps that were compiled, by shape."""
        self._open_jobs: dict[str, Job] = {}
        """Jobs of `run` that have neither an outcome yet nor a writer to tell it."""
        self.is_cancelled = False
        """Whether a run ended inside a group. Other hosts that were given it may wait for this one."""
        self._inputs = Inputs()
        self._writings: queue.Queue[_Writing | None] = queue.Queue(maxsize=1)
        self._writer = threading.Thread(target=self._write_all, name="writer")
        self._writer.start()

    def run(self, jobs: Sequence[Job]) -> None:
        """Carries out jobs of one shape. Outcomes are reported when their files are at their places."""
        self._open_jobs = {job.id: job for job in jobs}
        try:
            self._run_groups(list(jobs))
        except CancelledError as error:
            self.is_cancelled = True
            self._fail(list(self._open_jobs.values()), error)

    def _run_groups(self, waiting: list[Job]) -> None:
        while waiting:
            try:
                with hosts.failing_together(CancelledError) as facts:
                    pipeline = self._open(waiting[0].request)
                    count = self._count_rows(pipeline, waiting)
                    facts |= {"model": pipeline.model_fingerprint, "batch_size": str(count)}
            except CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - a job's error is its outcome
                self._fail(waiting, error)
                return
            group, waiting = waiting[:count], waiting[count:]
            self._run_group(pipeline, group)

    def close(self) -> None:
        """Waits until all files are written, and frees the devices' memory."""
        if self._writer.is_alive():
            self._writings.put(None)
            self._writer.join()
        if self._pipeline is not None:
            self._pipeline.running.unload()
            self._pipeline = None
        self._inputs.close()

    def _open(self, request: Request) -> VideoPipeline:
        if self._pipeline is None or self._model_key != request.model_key:
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

    def _count_rows(self, pipeline: VideoPipeline, jobs: Sequence[Job]) -> int:
        """How many of the jobs share the next steps."""
        values = jobs[0].request.values
        alone = any(name in values for name in ("contact_sheet", "num_videos", "strength"))
        if self._batch_size == 1 or alone:
            return 1
        # Without what is a job's own: a bad seed fails that job, and not those that would share a step with it.
        common = {name: value for name, value in values.items() if name not in PER_ROW_FIELDS}
        settings = pipeline.settings(**opening.choose_settings(common, pipeline.family.card.presets))
        most = choose_rows(pipeline, settings) if self._batch_size is None else self._batch_size
        return min(most, len(jobs))

    def _run_group(self, pipeline: VideoPipeline, jobs: Sequence[Job]) -> None:
        started, seconds = time.monotonic(), dict[str, float]()
        rows, init_image = list[_Row](), None
        try:
            with hosts.failing_together(CancelledError):
                values = self._inputs.fetch(jobs[0].request.values)
                pipeline.use_loras(values.get("lora", ()))
                images = opening.read_images(values)
                opening.check_last_image(values, pipeline)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001
            self._fail(jobs, error)
            return
        for job in jobs:
            try:
                with hosts.failing_together(CancelledError):
                    settings, paths = self._check(pipeline, job)
                with hosts.failing_together(CancelledError):
                    row, init_image = self._encode(pipeline, job, settings, paths, images)
                rows.append(row)
            except CancelledError:
                raise
            except Exception as error:  # noqa: BLE001
                self._fail([job], error)
        seconds["encoding"] = time.monotonic() - started
        if not rows:
            return
        try:
            with hosts.failing_together(CancelledError):
                self._denoise_and_decode(pipeline, rows, init_image, started, seconds)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001
            if len(rows) == 1:
                self._fail([rows[0].job], error)
                return
            for row in rows:  # one of them may be the reason, or there are too many for the memory
                self._run_group(pipeline, [row.job])

    def _check(self, pipeline: VideoPipeline, job: Job) -> tuple[GenerationSettings, tuple[str, ...]]:
        """The settings of a job, and the names of its videos, which the first host knows."""
        settings = pipeline.settings(**opening.choose_settings(job.request.values, pipeline.family.card.presets))
        if not hosts.is_first_host():
            return settings, ()
        with self._folder.writing() as directory:
            place = self._folder.check_inside(directory, job.output)
            paths = [path.relative_to(directory) for path in media.check_output(place, settings)]
        return settings, tuple(map(str, paths))

    @staticmethod
    def _encode(
        pipeline: VideoPipeline,
        job: Job,
        settings: GenerationSettings,
        paths: tuple[str, ...],
        images: Sequence[Image],
    ) -> tuple[_Row, InitImage | None]:
        init_image, given = opening.encode_init_image(job.request.values, pipeline, images, settings)
        embeddings = pipeline.encode(job.request.prompt, settings, given)
        description = artifacts.describe(
            job.request.prompt,
            settings,
            pipeline,
            images_fingerprint=fingerprint(images),
            loras=pipeline.loras.text,
            attention_window=pipeline.attention_window,
        )
        if init_image is not None:
            description["strength"] = str(init_image.strength)
        return _Row(job, settings, paths, embeddings, description), init_image

    def _denoise_and_decode(
        self, pipeline: VideoPipeline, rows: Sequence[_Row], init_image: Any, started: float, seconds: dict[str, float]
    ) -> None:
        shape_key = rows[0].job.request.shape_key
        # Copies of the last row make up the number that a program was compiled for: cheaper than another program.
        count = max(len(rows), self._rows_used.get(shape_key, 0))
        padded = [*rows, *[rows[-1]] * (count - len(rows))]
        settings, seeds = rows[0].settings, tuple[int, ...]()
        if count > 1:
            settings = dataclasses.replace(settings, num_videos=count)
            seeds = tuple(row.settings.seed for row in padded)
        begun = time.monotonic()
        embeddings = merge_embeddings([row.embeddings for row in padded])
        latents = pipeline.denoise(embeddings, settings, init_image, seeds=seeds)
        self._rows_used[shape_key] = count
        seconds["denoising"] = time.monotonic() - begun
        chunks: queue.Queue[torch.Tensor | BaseException | None] = queue.Queue(maxsize=_CHUNKS_AHEAD)
        self._writings.put(_Writing(rows, started, chunks, seconds))
        begun = time.monotonic()
        try:
            for part in pipeline.decode(latents, settings):
                chunks.put(part)
        except BaseException as error:
            chunks.put(error)
            raise
        seconds["decoding"] = time.monotonic() - begun
        chunks.put(None)
        for row in rows:
            self._open_jobs.pop(row.job.id, None)  # the writer tells their outcome

    def _write_all(self) -> None:
        while (writing := self._writings.get()) is not None:
            try:
                placed = self._write(writing)
            except _DecodeError:
                continue  # the thread that decodes reports it
            except Exception as error:  # noqa: BLE001
                if self._drain(writing):
                    self._fail([row.job for row in writing.rows], error)
                continue
            seconds = {**writing.seconds, "total": time.monotonic() - writing.started}
            for row, outputs in zip(writing.rows, placed, strict=True):
                self._on_outcome(Outcome(row.job.id, "done", outputs, cut=row.embeddings.cut, seconds=seconds))

    @staticmethod
    def _drain(writing: _Writing) -> bool:
        """Takes what the decoder would wait for ever to hand over. Whether it decoded everything."""
        try:
            for _ in () if writing.is_decoded else writing.take_chunks():
                pass
        except _DecodeError:
            return False
        return True

    def _write(self, writing: _Writing) -> list[tuple[OutputFile, ...]]:
        rows = writing.rows
        if not hosts.is_first_host():
            for _ in writing.take_chunks():  # the first host writes what all of them compute
                pass
            return [() for _ in rows]
        sheet = rows[0].job.request.values.get("contact_sheet")
        with self._folder.writing() as directory:
            paths = [directory / name for row in rows for name in row.paths]
            for name in (*(name for row in rows for name in row.paths), *([] if sheet is None else [sheet])):
                self._folder.check_inside(directory, name)
            media.write_videos(
                paths,
                (chunk[: len(paths)] for chunk in writing.take_chunks()),
                fps=rows[0].settings.fps,
                metadata=[{**row.metadata, "video": str(index)} for row in rows for index in range(len(row.paths))],
                sheet=None if sheet is None else directory / sheet,
            )
            files = [
                self._folder.place(directory, [name for path in row.paths for name in _list_files(directory, path)])
                for row in rows
            ]
            if sheet is not None:
                files[0] += self._folder.place(directory, [sheet])
        return [tuple(each) for each in files]

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        for job in jobs:
            self._open_jobs.pop(job.id, None)
            self._on_outcome(outcome_of_error(job.id, error))


class _DecodeError(Exception):
    """Frames that will not come."""


def _list_files(directory: Path, name: str) -> list[str]:
    """The files of an output: one, or the frames of a sequence."""
    if "%" not in name:
        return [name]
    place, pattern = directory / Path(name).parent, frame_name_pattern(Path(name).name)
    return sorted(path.relative_to(directory).as_posix() for path in place.iterdir() if pattern.fullmatch(path.name))
