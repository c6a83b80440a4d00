"""Workers of a driver in a Ray cluster: actors that come and go with its machines.

An actor proves by its work that it lives. One that makes no progress is killed, one that died is replaced, and the jobs
of both are given back. Torch and jax are not imported here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy_tpu
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.driver import ModelFacts
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.jobs.preview_rate import PreviewRate
from comfy_tpu.jobs.ray_actor import WORKER_MODULE, ActorSetup, Hello, HostsPlace, JobActor, ModelRefusal, Report
from comfy_tpu.jobs.ray_cluster import Cluster, Place, describe, find_slices, import_ray
from comfy_tpu.jobs.ray_slices import SlicePlacement, parse_slice_name, worker_number
from comfy_tpu.jobs.request import FILE_FIELDS, Request, split_lora
from comfy_tpu.jobs.worker_thread import GROUPS_AHEAD, ROWS_MAX

logger = logging.getLogger(__name__)

STALL_SECONDS = {
    "starting": 1800.0,  # torch and jax are imported, and a model of 100 GB may be downloaded in between
    "loading": 1800.0,
    "compiling": 1800.0,  # one report before and one after; XLA takes minutes for a large model, on a slow host more
    "encoding": 900.0,
    "denoising": 900.0,  # a step; the longest that `plan` knows takes two minutes
    "decoding": 900.0,  # and then writing and uploading, with five attempts
}
"""Seconds without progress, by the last stage, after which a worker that has jobs, or is starting, counts as dead."""

_POLL_SECONDS = 5.0
"""For which an actor keeps a question open while nothing happens."""
_SCALE_SECONDS = 2.0
"""Between two looks at what the cluster has."""
_PAUSE_MAX = 60.0
"""Seconds before a dead worker is replaced: 1, then twice as long each time, until one finishes a job."""
_LOSSES_MAX = 5
"""Workers in a row that fail with an error of Python, before any job was finished: none will start."""
_WAIT_SECONDS = 15.0
"""After which the user is told that no worker has started."""


@dataclasses.dataclass(frozen=True)
class RayConfig:
    address: str | None = None
    """auto, or HOST:PORT; None: a Ray of its own on this machine."""
    workers: int | None = None
    """The most workers; None: as many as the cluster has room for."""
    slice_name: str | None = None
    """Each worker is such a slice: v6e-16."""
    worker_module: str = WORKER_MODULE
    stall_seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict(STALL_SECONDS))

    def __post_init__(self) -> None:
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 1):
            raise InvalidValueError(f"workers={self.workers} is no number of workers; give 1 or more", field="workers")
        if self.slice_name is not None:
            if self.address is None:
                raise InvalidValueError(
                    f"slice={self.slice_name} is part of a cluster; give --ray auto or --ray HOST:PORT too",
                    field="slice",
                )
            parse_slice_name(self.slice_name)


class RayWorkers:
    """Implements `driver.Workers`. To be made in the main thread, and closed."""

    def __init__(
        self,
        folder: Folder,
        config: RayConfig,
        *,
        batch_size: int | None,
        report: Callable[[str], None],
        previews: PreviewRate | None = None,
        checkpoint_every: int | None = None,
    ) -> None:
        """`report` shows the user a sentence. `previews`: knows which jobs are watched; None: there are none.
        `checkpoint_every`: steps between two saves of a job's steps; None: they are not saved."""
        self._ray = import_ray()
        if checkpoint_every is not None and config.address is not None and not folder.is_remote:
            raise InvalidValueError(
                f"checkpoint_every={checkpoint_every} needs an output that all machines of a cluster reach, and "
                f"{folder.address} is a directory of this one; give an address such as gs://bucket/videos",
                field="checkpoint_every",
            )
        if folder.address.startswith("memory://"):
            raise InvalidValueError(
                f"output={folder.address} is in the memory of one process; choose a place that all workers reach",
                field="output",
            )
        self._folder = folder
        self._config = config
        self._batch_size = batch_size
        self._checkpoint_every = checkpoint_every
        self._report = report
        self._previews = previews
        self._group_size = ROWS_MAX if batch_size is None else batch_size
        self._numbers = itertools.count(1)
        self._workers: list[_Worker] = []
        self._happened: list[Outcome | Event] = []
        """To be returned by the next `wait`."""
        self._losses = 0
        """Workers that died since one finished a job."""
        self._has_finished = False
        self._start_at = 0.0
        self._scale_at = 0.0
        self._told: set[str] = set()
        self._chosen: _Worker | None = None
        self._is_closed = False
        self._cluster = Cluster(config.address, num_cpus=config.workers)
        self._started_at = time.monotonic()
        try:
            self._check_local()
            self._scale()
        except BaseException:
            self.close()
            raise

    def _check_local(self) -> None:
        if self._config.address is not None:
            return
        places = self._places()
        if self._config.workers is not None and len(places) < self._config.workers:
            raise InvalidValueError(
                f"workers={self._config.workers}, but this machine has {describe(places)}; each has one worker: choose "
                f"{'1' if len(places) == 1 else f'1 to {len(places)}'}",
                field="workers",
            )

    @property
    def count(self) -> int:
        """Those that can take jobs."""
        return max(1, sum(worker.is_ready for worker in list(self._workers)))

    def capacity(self, waiting: int) -> int:
        # A share: with as many jobs as workers, each has one. The group that waits behind a running one is taken only
        # while there are jobs for all.
        free = [worker for worker in self._workers if worker.is_ready and not worker.groups]
        if not free and waiting >= len(self._workers):
            free = [worker for worker in self._workers if worker.is_ready and len(worker.groups) < GROUPS_AHEAD]
        self._chosen = min(free, key=lambda worker: len(worker.groups), default=None)
        if self._chosen is None:
            return 0
        return max(1, min(self._group_size, waiting // len(self._workers)))

    def preference(self) -> tuple[str | None, str | None]:
        last = None if self._chosen is None else self._chosen.last
        return (None, None) if last is None else (last.model_key, last.shape_key)

    def give(self, jobs: list[Job]) -> str:
        assert self._chosen is not None
        self._chosen.give(jobs)
        return self._chosen.name

    def wait(self, timeout: float) -> list[Outcome | Event]:
        if not self._is_closed:
            self._scale()
            self._receive(0.0 if self._happened else timeout)
            self._kill_stalled()
        happened, self._happened = self._happened, []
        return happened

    def cancel(self) -> None:
        """At once: files appear whole or not at all, and jobs that are not reported are done again."""
        for worker in self._workers:
            self._happened += [Outcome(each, "returned") for each in worker.job_ids()]
            worker.kill()
        self._workers = []

    def cancel_job(self, id_: str) -> None:
        """As `WorkerThread.cancel_job`. May be called from any thread."""
        for worker in list(self._workers):
            if id_ in worker.job_ids():
                worker.cancel_job(id_)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(Exception):  # the cluster may be gone
            self.cancel()
        self._cluster.close()

    def find_model_facts(self, request: Request) -> ModelFacts:
        """Has a worker open the model."""
        while True:
            worker = next((worker for worker in self._workers if worker.is_ready), None)
            if worker is None:
                self._happened = self.wait(0.2)
                continue
            try:
                asked = worker.actors[0].find_model_facts.remote(resolve_paths(request))
                found = self._ray.get(asked, timeout=self._config.stall_seconds["starting"])
            except self._ray.exceptions.RayError as error:
                self._lose(worker, error)
                continue
            if isinstance(found, ModelRefusal):
                kind = InvalidValueError if found.is_invalid else ComfyTpuError
                raise kind(found.text, field=found.field)
            assert isinstance(found, ModelFacts)
            return found

    def _receive(self, timeout: float) -> None:
        """Takes what the actors have to say, and asks them again."""
        asked = {ref: worker for worker in self._workers for ref in worker.asked}
        if not asked:
            time.sleep(min(timeout, 0.2))
            return
        ready, rest = self._ray.wait(list(asked), timeout=timeout)
        if ready and rest:
            ready += self._ray.wait(rest, num_returns=len(rest), timeout=0.0)[0]
        for ref in ready:
            worker = asked[ref]
            if worker not in self._workers:
                continue  # it was lost by another of its actors
            try:
                self._take(worker, ref, self._ray.get(ref, timeout=self._config.stall_seconds["decoding"]))
            except self._ray.exceptions.RayError as error:
                self._lose(worker, error)

    def _take(self, worker: _Worker, ref: Any, answer: Any) -> None:
        report = worker.take(ref, answer)
        if isinstance(answer, Hello):
            self._cluster.add_process(answer.host, answer.process)
            if answer.version != comfy_tpu.__version__:
                raise ComfyTpuError(
                    f"comfy-tpu is {comfy_tpu.__version__} here and {answer.version} on {answer.host}; install the "
                    "same version on all machines"
                )
        if report is None:
            return
        for happened in report.happened:
            if isinstance(happened, Event):
                worker.note_progress(happened.stage)
                self._happened.append(happened)
            elif worker.finish(happened.id):
                worker.note_progress()
                self._happened.append(happened)
                if happened.state == "done":
                    self._losses, self._has_finished = 0, True
        if report.is_ending:
            self._happened += [Outcome(each, "returned") for each in worker.job_ids()]
            self._remove(worker)

    def _kill_stalled(self) -> None:
        for worker in list(self._workers):
            limit = self._config.stall_seconds[worker.stage]
            if worker.seconds_without_progress() > limit and (worker.groups or not worker.is_ready):
                reason = f"no progress for {limit:.0f} s in stage {worker.stage}"
                if not worker.is_ready:
                    self._tell(f"{worker.name} is given up: {reason}")
                self._lose(worker, reason)

    def _lose(self, worker: _Worker, error: Exception | str) -> None:
        """Gives a dead worker's jobs back, and has it replaced after a while."""
        reason = error if isinstance(error, str) else _describe(error)
        logger.info("worker %s is lost: %s", worker.name, reason)
        self._happened += [Outcome(each, "returned", is_lost=True) for each in worker.job_ids()]
        self._remove(worker)
        self._losses += 1
        pause = min(_PAUSE_MAX, 2.0 ** (self._losses - 1))
        self._start_at = time.monotonic() + pause * random.uniform(0.5, 1.0)
        is_program = isinstance(error, Exception) and not (isinstance(error, TimeoutError) or _is_death(error))
        if is_program and not self._has_finished and self._losses >= _LOSSES_MAX:
            raise ComfyTpuError(f"no worker could start ({reason}); install the same comfy-tpu on all machines")

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.kill()

    def _places(self) -> list[Place]:
        return self._cluster.places(is_cpu_shared=self._config.workers is not None)

    def _scale(self) -> None:
        """Starts workers for places that have none."""
        now = time.monotonic()
        if now < max(self._scale_at, self._start_at):
            return
        self._scale_at = now + _SCALE_SECONDS
        if not any(worker.is_ready for worker in self._workers) and now - self._started_at > _WAIT_SECONDS:
            self._tell("waiting for the cluster: no worker has started yet")
        if self._config.slice_name is not None:
            self._scale_slices(self._config.slice_name)
            return
        places = self._places()
        slices = find_slices(self._cluster.nodes())
        if slices and not any(place.kind == "tpu" for place in places):  # their hosts' CPUs are not what is meant
            name = min(slices)
            raise InvalidValueError(
                f"the cluster has slices of several hosts ({', '.join(sorted(slices))}), which work together; give "
                f"--slice {name}",
                field="slice",
            )
        wanted = len(places) if self._config.workers is None else self._config.workers
        if wanted > len(places):
            self._tell(f"{wanted} workers are wanted and the cluster has {describe(places)}: the others start with it")
        used = {worker.node_id for worker in self._workers}
        for place in places:
            if len(self._workers) >= wanted:
                return
            if place.kind != "tpu" or place.node_id not in used:
                self._start([place.options()], node_id=place.node_id)
        # More than there is room for: an autoscaler sees that they wait.
        while places and places[0].kind != "tpu" and len(self._workers) < wanted:
            self._start([places[0].options()])

    def _scale_slices(self, name: str) -> None:
        slice_ = parse_slice_name(name)
        if self._config.workers is not None and len(self._workers) >= self._config.workers:
            return
        if any(worker.stage == "starting" and not worker.is_ready for worker in self._workers):
            return  # a reservation holds the driver up
        try:
            placement = SlicePlacement(slice_)
        except TimeoutError:
            if not self._workers:
                self._tell(f"waiting for a slice {slice_.name}: the cluster has none that is free")
            self._scale_at = time.monotonic() + 6 * _SCALE_SECONDS
            return
        self._start(placement.options(), release=placement.release)

    def _start(
        self, options: list[dict[str, Any]], *, node_id: str = "", release: Callable[[], None] = lambda: None
    ) -> None:
        name = f"worker-{next(self._numbers)}"
        # Not on several hosts: all would have to fetch the latents, and each learns at its own step who watches.
        previews = self._previews if len(options) == 1 else None
        setup = ActorSetup(
            name,
            self._folder.address,
            self._batch_size,
            self._config.worker_module,
            self._cluster.scratch,
            makes_previews=previews is not None,
            checkpoint_every=self._checkpoint_every,
        )
        # Three groups of threads in the actor: jobs are taken in their order, while questions stay open.
        kind = self._ray.remote(concurrency_groups={"give": 1, "ask": 1})(JobActor)
        actors = [kind.options(**each, max_restarts=0).remote(setup) for each in options]
        self._workers.append(_Worker(self._ray, name, actors, node_id, self._cluster.nodes, release, previews))

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._report(text)


class _Worker:
    """One actor, or those of the hosts of one slice; the first has the say."""

    def __init__(
        self,
        ray: Any,
        name: str,
        actors: list[Any],
        node_id: str,
        nodes: Callable[[], list[dict[str, Any]]],
        release: Callable[[], None],
        previews: PreviewRate | None,
    ) -> None:
        self._ray = ray
        self._previews = previews
        self.name = name
        self.actors = actors
        self.node_id = node_id
        self._nodes = nodes
        self._release = release
        self.groups: list[set[str]] = []
        """Ids of the jobs without an outcome, by group."""
        self.last: Request | None = None
        self.is_ready = False
        self.stage = "starting"
        self._progress_at = time.monotonic()
        self._hellos: dict[Any, Hello] = {}
        self.asked: dict[Any, Any] = {actor.hello.remote(): actor for actor in actors}
        """Actors by the reference of what they were asked."""

    def take(self, ref: Any, answer: Any) -> Report | None:
        """Handles an answer, and asks what comes next. The report, if it is one of the first actor."""
        actor = self.asked.pop(ref)
        if isinstance(answer, Report):
            self._ask(actor)
            return answer if actor is self.actors[0] or answer.is_ending else None
        self._progress_at = time.monotonic()
        if isinstance(answer, Hello):
            self._hellos[actor] = answer
            if len(self._hellos) == len(self.actors) > 1:
                self._sort()
                self.asked[self.actors[0].find_coordinator.remote()] = self.actors[0]
        elif isinstance(answer, str):
            for number, each in enumerate(self.actors):
                place = HostsPlace(answer, len(self.actors), number)
                self.asked[each.join_hosts.remote(place)] = each
        if not self.asked:
            self.is_ready = True
            for each in self.actors:
                self._ask(each)
        return None

    def _sort(self) -> None:
        numbers = {node["NodeID"]: worker_number(node) for node in self._nodes()}
        self.actors.sort(key=lambda actor: numbers.get(self._hellos[actor].node_id, 0))

    def _ask(self, actor: Any) -> None:
        # A question is answered after each step: who begins to watch is known to the actor one step later.
        watched = () if self._previews is None else tuple(set(self._previews.watched()).intersection(self.job_ids()))
        ref = actor.happened.options(concurrency_group="ask").remote(_POLL_SECONDS, watched)
        self.asked[ref] = actor

    def give(self, jobs: list[Job]) -> None:
        if not self.groups:
            self._progress_at = time.monotonic()
        self.groups.append({job.id for job in jobs})
        if self.last is None or self.last.model_key != jobs[0].request.model_key:
            self.stage = "starting"
        self.last = jobs[0].request
        sent = [dataclasses.replace(job, request=resolve_paths(job.request)) for job in jobs]
        for actor in self.actors:
            actor.give.options(concurrency_group="give").remote(sent)

    def cancel_job(self, id_: str) -> None:
        for actor in self.actors:
            actor.cancel_job.options(concurrency_group="give").remote(id_)

    def finish(self, id_: str) -> bool:
        """Whether the job was this worker's."""
        for group in self.groups:
            if id_ in group:
                group.remove(id_)
                self.groups = list(filter(None, self.groups))
                return True
        return False

    def job_ids(self) -> Iterator[str]:
        return itertools.chain.from_iterable(set(group) for group in list(self.groups))

    def note_progress(self, stage: str | None = None) -> None:
        self._progress_at = time.monotonic()
        if stage in STALL_SECONDS:
            self.stage = stage

    def seconds_without_progress(self) -> float:
        return time.monotonic() - self._progress_at

    def kill(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(Exception):  # it may be dead, or the cluster gone
                self._ray.kill(actor)
        self._release()


def resolve_paths(request: Request) -> Request:
    """Files of this machine by their whole paths: an actor has another working directory, perhaps the same disk."""
    values = dict(request.values)
    for name in (*FILE_FIELDS, "model", "cache_dir"):
        if name in values:
            given = values[name]
            values[name] = (
                [_resolve(name, each) for each in given] if isinstance(given, list) else _resolve(name, given)
            )
    return Request(values)


def _resolve(name: str, text: str) -> str:
    path, chosen = split_lora(text) if name == "lora" else (text, {})
    if "://" in path or not (Path(path).exists() or name == "cache_dir"):
        return text
    # With its strength, where the path has colons: a machine without the file would take the last part for one.
    rest = ":1.0" if name == "lora" and not chosen and ":" in path else text.removeprefix(path)
    return f"{Path(path).absolute()}{rest}"


def _is_death(error: Exception) -> bool:
    """Whether an actor's process ended, rather than raised."""
    from ray.exceptions import RayActorError

    return isinstance(error, RayActorError) and "creation task" not in str(error)


def _describe(error: Exception) -> str:
    """The last line of a remote traceback, or the first of a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return (lines[0] if _is_death(error) else lines[-1])[:300]
