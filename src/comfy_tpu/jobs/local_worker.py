"""The worker of this process, and what a Ray actor runs in its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from comfy_tpu.config import HostsConfig
from comfy_tpu.jobs import host_executor
from comfy_tpu.jobs.driver import ModelFacts
from comfy_tpu.jobs.execution import Executor
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.host_executor import LeadingExecutor
from comfy_tpu.jobs.opening import choose_model
from comfy_tpu.jobs.outcome import Outcome
from comfy_tpu.jobs.preview_rate import PreviewRate
from comfy_tpu.jobs.ray_actor import HostsPlace
from comfy_tpu.jobs.request import DEFAULT_MODEL, Request
from comfy_tpu.jobs.saved_steps import SavedSteps
from comfy_tpu.jobs.worker_thread import ROWS_MAX, JobExecutor, WorkerThread
from comfy_tpu.parallel import hosts
from comfy_tpu.pipeline.progress import ProgressCallback
from comfy_tpu.pipeline.single_files import open_model

logger = logging.getLogger(__name__)

NAME = "local"


class LocalWorker(WorkerThread):
    """On several hosts, that of the first, whose jobs the others carry out with it: `follow`."""

    def __init__(
        self,
        folder: Folder,
        *,
        batch_size: int | None = None,
        name: str = NAME,
        previews: PreviewRate | None = None,
        checkpoint_every: int | None = None,
    ) -> None:
        """`batch_size`: the most prompts that share a step; None: as many as there is room for. `checkpoint_every`:
        steps between two saves of a job's steps; None: they are not saved."""

        def make(on_outcome: Callable[[Outcome], None], on_progress: ProgressCallback) -> JobExecutor:
            executor = Executor(
                folder,
                batch_size=batch_size,
                on_outcome=on_outcome,
                on_progress=on_progress,
                learns_colours=previews is not None,
                saved_steps=_open_steps(folder, checkpoint_every),
            )
            return LeadingExecutor(executor) if hosts.host_names() else executor

        super().__init__(name, ROWS_MAX if batch_size is None else batch_size, make, previews)


def follow(folder: Folder, *, batch_size: int | None, checkpoint_every: int | None = None) -> None:
    """Carries out the first host's jobs with it, until there are no more. Nothing is written here."""
    steps = _open_steps(folder, checkpoint_every)
    host_executor.follow(Executor(folder, batch_size=batch_size, on_outcome=lambda outcome: None, saved_steps=steps))


def _open_steps(folder: Folder, every: int | None) -> SavedSteps | None:
    return None if every is None else SavedSteps(folder, every)


def find_model_facts(request: Request) -> ModelFacts:
    """Opens the model's files, and downloads them if needed."""
    model = choose_model(request.values)
    ignored = request.values.get("ignore_config_key") or ()
    files = open_model(DEFAULT_MODEL if model is None else model, ignored_keys=ignored)
    return ModelFacts(files.fingerprint, files.family.card.limits.frames_max == 1)


_joined = contextlib.ExitStack()
"""Open from `join_hosts` to the end of the process."""


def join_hosts(place: HostsPlace) -> None:
    """Makes this process one of several that run a model together, before it uses a device."""
    config = HostsConfig(coordinator=place.coordinator, num_processes=place.num_processes, process_id=place.process_id)
    # A thread of the actor, whose main thread is Ray's. That gives jobs back at a signal by itself.
    _joined.enter_context(hosts.start_hosts(config, report=logger.error, watches_signals=False))
    hosts.start_devices(config)
