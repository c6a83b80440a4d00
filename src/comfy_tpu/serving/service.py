"""The jobs of clients: accepted, looked at, cancelled, removed; one worker in this process carries them out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import LedgerError, NewJob, OutputFile
from comfy_tpu.jobs.opening import read_media
from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.jobs.preview_rate import PreviewRate
from comfy_tpu.jobs.request import Request, runs_alone
from comfy_tpu.jobs.served_ledger import OVER, Kind, Order, Record
from comfy_tpu.jobs.worker_thread import ROWS_MAX
from comfy_tpu.serving.activity import PREPARATIONS, Activity
from comfy_tpu.serving.admission import Admission
from comfy_tpu.serving.config import ServeConfig
from comfy_tpu.serving.estimates import Estimator
from comfy_tpu.serving.given_files import check_uploads, fit_references, sort_uploads
from comfy_tpu.serving.hidden_paths import find_roots, hide_paths
from comfy_tpu.serving.input_room import InputRoom, UnavailableError
from comfy_tpu.serving.job_progress import JobProgress
from comfy_tpu.serving.orders import make_request
from comfy_tpu.serving.planner import Planner, count_rows
from comfy_tpu.serving.recovery import open_ledger
from comfy_tpu.serving.retention import Sweeper
from comfy_tpu.serving.scheduler import JobWorkers, Scheduler
from comfy_tpu.serving.served_model import ServedModel
from comfy_tpu.serving.shapes import NewShapes, check_sizes, media_shape, own_size, shape_of
from comfy_tpu.serving.tracing import record_job
from comfy_tpu.serving.warm_up import WARM_UP, make_warm_up

if TYPE_CHECKING:
    from comfy_tpu.serving.uploads import Upload

logger = logging.getLogger(__name__)

_LEARNED = 50
"""Jobs of earlier servers whose times are taken over."""
_RETRY_SECONDS = 10.0
"""Where no job was measured yet."""


class NotFoundError(InvalidValueError):
    """There is no such job, or it is another client's."""


class Service:
    def __init__(
        self,
        config: ServeConfig,
        models: Mapping[str, ServedModel],
        make_workers: Callable[[Folder], JobWorkers],
        previews: PreviewRate | None = None,
        *,
        planner: Planner | None = None,
        tracer: Any | None = None,
    ) -> None:
        """`previews`: the one of the workers, which is told who watches. `planner`: knows the workers' devices; None:
        nobody does. `tracer`: of OpenTelemetry."""
        self.config, self.models = config, models
        self.previews = PreviewRate() if previews is None else previews
        self.hide_paths = functools.partial(hide_paths, names=models, roots=find_roots(config))
        """From a message for clients."""
        self.folder = Folder(str(config.directory))
        self.folder.prepare()
        self.inputs = config.directory / "inputs"
        self.inputs.mkdir(exist_ok=True)
        self.ledger = open_ledger(self.folder.ledger_path, config.directory)
        self._input_room = InputRoom(self.ledger, config.directory, config.retention.bytes // max(1, len(config.keys)))
        self.started_at = time.time()
        self._progress: dict[str, JobProgress] = {}
        self._is_ready = threading.Event()
        self.is_stopping: Callable[[], bool] = lambda: False
        """Whether the server was told to end: whoever waits for a job is not to wait any longer."""
        self.activity = Activity()
        self._planner = planner
        self.estimator = Estimator(planner)
        self._admission = Admission(planner, self.estimator, config.limits.job_seconds)
        self._new_shapes = NewShapes(config.limits.new_shapes)
        self._tracer = tracer
        self.failure = ""
        """Why no job can be carried out."""
        self.on_failure: Callable[[], None] = lambda: None
        self._workers = make_workers(self.folder)
        first = next(iter(models.values()))
        common = {**config.common, **own_size(first, config.limits.sizes)}
        warm_up = make_warm_up(first.name, first.card, first.defaults, common, self.inputs)
        values = warm_up.request.values
        media = media_shape(first, read_media(values))
        self._new_shapes.know([(shape_of(first.name, settings), media) for settings in first.passes(values)])
        self._scheduler = Scheduler(
            self.ledger,
            self.folder,
            self._workers,
            first=warm_up,
            measure=self.activity.preparation_seconds,
            on_given=lambda jobs: self.activity.begin(job.id for job in jobs),
            on_event=self._on_event,
            on_outcome=self._on_outcome,
            on_failure=lambda error: self._fail(f"{type(error).__name__}: {error}"),
        )
        self._sweeper = Sweeper(self.ledger, config.directory, self.inputs, config.retention, self.remove)

    def enforce_retention(self) -> None:
        """Removes what is not kept any longer. By itself this happens once a minute."""
        self._sweeper.sweep()

    def start(self) -> None:
        """Makes one step with the first model, and begins with the jobs that wait."""
        self._learn_times()
        self._scheduler.start()
        self._sweeper.start()

    def _learn_times(self) -> None:
        """From the last jobs of the servers before."""
        kinds: tuple[Kind, ...] = ("video", "image")
        for record in itertools.chain(*(self.ledger.list_jobs(None, kind, limit=_LEARNED) for kind in kinds)):
            if record.state == "done":
                self._record_time(record)

    def _record_time(self, record: Record) -> None:
        model, seconds = self.models.get(record.request.model), record.seconds.get("total")
        if model is not None and seconds and "stage" not in record.request.values:
            # What the first job of a shape waits for is not what the next one will take.
            work = seconds - sum(record.seconds.get(stage, 0.0) for stage in PREPARATIONS)
            with contextlib.suppress(InvalidValueError):  # of a server that took other values
                self.estimator.record(model.name, model.passes(record.request.values), max(work, 0.0))

    def close(self) -> None:
        """Running jobs are given back, for the next server."""
        self._sweeper.close()
        try:
            self._scheduler.close()
        finally:
            self.ledger.close()

    @property
    def is_ready(self) -> bool:
        """Whether a step was made in this process, and the next would be."""
        return self._is_ready.is_set() and not self.problem

    @property
    def problem(self) -> str:
        """Why no job can be carried out, for good or at the moment; empty where that is not so. Without paths: those
        without a key may see it, too."""
        return "no worker is left; the log says why" if self.failure else self._scheduler.trouble

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.on_failure()

    def find_model(self, name: Any) -> ServedModel:
        if name is None or name == "":
            return next(iter(self.models.values()))
        if not isinstance(name, str) or name not in self.models:
            raise InvalidValueError(
                f"model={str(name)[:80]!r} is not served here; choose from {', '.join(self.models)}", field="model"
            )
        return self.models[name]

    def accept(
        self, body: Mapping[str, Any], kind: Kind, client: str, key: str | None, uploads: Sequence[Upload] = ()
    ) -> Record:
        """The job of an order, which is in the ledger by then. Raises InvalidValueError, QueueFullError, KeyUsedError,
        UnavailableError or NotFoundError."""
        said = json.dumps([kind, dict(body), [[each.given, each.digest] for each in uploads]], sort_keys=True)
        order = Order(client, kind, key, hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest())
        # Before anything else: what was accepted once is not refused the second time, whatever has changed since.
        known = self.ledger.find_order(order)
        record = None if known is None else self.ledger.find(known)
        if record is not None:
            return record
        model = self.find_model(body.get("model"))
        if model.kind != kind:
            raise InvalidValueError(f"model={model.name} makes {model.kind}s, not {kind}s", field="model")
        names_size = body.get("size") not in (None, "", "auto")
        body = {**({} if names_size else own_size(model, self.config.limits.sizes)), **body, "model": model.name}
        request = make_request(body, self.config, model.card, model.defaults, model.presets)
        fit_references(model, uploads)
        request, shape = check_uploads(request, model, uploads)
        passes = model.passes(request.values)
        self.check_shapes(client, model.name, passes, shape)  # before the plan, which traces what is new
        estimate = self._admission.admit(model.name, model.card, passes)
        order = dataclasses.replace(
            order,
            estimate=estimate,
            rows=self._count_rows(model, request, passes[0]),
            input_bytes=sum(upload.path.stat().st_size for upload in uploads),
        )
        # After the plan, which may take seconds: ids are in the order in which jobs are accepted.
        id_ = self.ledger.new_id(kind)
        places = {upload: self.inputs / f"{id_}-{number}" for number, upload in enumerate(uploads)}
        media = {
            name: [str(places[upload]) for upload in given] for name, given in sort_uploads(model.card, uploads).items()
        }
        request = Request({**request.values, **media})
        try:
            for upload, path in places.items():
                upload.path.replace(path)
            accepted = self.submit(NewJob(id_, 0, request, f"{id_}{_suffix(kind)}"), order)
        except BaseException:
            self.remove_inputs(id_)
            raise
        if accepted != id_:
            self.remove_inputs(id_)
        prompt = {"prompt": request.prompt} if self.config.logs_prompts else {}
        facts = {"job": accepted, "client": client, "model": model.name, **prompt}
        logger.info("job %s: accepted", accepted, extra=facts)
        record = self.ledger.find(accepted)
        if record is None:
            raise NotFoundError(f"{accepted} was deleted as soon as it was accepted")
        return record

    @contextlib.contextmanager
    def receiving(self, client: str, key: str | None, size: int) -> Iterator[None]:
        """Before a body of this size is read, and while it is. Raises QueueFullError or UnavailableError where an order
        would be refused whatever is in it; not for a key that has its job."""
        if key is not None and self.ledger.is_key_used(client, key):
            yield
            return
        self._check_problem()
        self.ledger.check_queue(client, **self._queue_limits())
        with self._input_room.reserve(client, size):
            yield

    def _check_problem(self) -> None:
        if self.problem:
            raise UnavailableError(f"no job can be carried out ({self.problem}); try again later")

    def _queue_limits(self) -> dict[str, Any]:
        """Each client has its share of the queue, however many jobs another one has put into it."""
        limit, clients = self.config.limits.queued_jobs, len(self.config.keys)
        return {"queue_limit": limit, "client_share": max(1, limit // clients) if clients > 1 else None}

    def _count_rows(self, model: ServedModel, request: Request, settings: GenerationSettings) -> int:
        """Jobs like this one that share a step: a worker is given no more, or one client's would go before all."""
        if runs_alone(model.card, request.values):
            return 1
        if self.config.batch_size is not None:
            return self.config.batch_size
        cost = None if self._planner is None else self._planner.cost(model.name, settings)
        if cost is not None and cost.rows is not None:
            return cost.rows
        return ROWS_MAX if model.files is None else count_rows(model.files, settings)

    def check_shapes(self, client: str, model: str, passes: Sequence[GenerationSettings], *others: Hashable) -> None:
        """Raises InvalidValueError for a size that is not taken, NewShapesError for more new shapes than a client with
        a key may order. `others`: what else makes other programs: given media, a stage that is run alone."""
        check_sizes(self.config.limits.sizes, passes)
        if self.config.keys:
            self._new_shapes.add(client, [(shape_of(model, settings), *others) for settings in passes])

    def submit(self, job: NewJob, order: Order) -> str:
        """Puts a job into the ledger; its id, or that of the same order before. Raises QueueFullError, KeyUsedError or
        UnavailableError."""
        self._check_problem()
        try:
            return self.ledger.accept(job, order, **self._queue_limits())
        except LedgerError as error:  # a server without jobs writes nothing else, and would not know
            self._scheduler.note_ledger_error(error)
            raise

    def wait_seconds(self, record: Record) -> float | None:
        """Seconds until a job that waits begins, as far as they can be estimated."""
        usual = self.estimator.usual_seconds() or record.estimate
        if record.state not in ("submitted", "leased") or usual is None:
            return None
        return self.ledger.seconds_ahead(record.id, usual) / self._workers.count

    def retry_seconds(self) -> int:
        """When a client whom a full queue refused may try again: after a job of usual length."""
        usual = self.estimator.usual_seconds() or _RETRY_SECONDS
        return max(1, min(600, round(usual / self._workers.count)))

    def find(self, id_: str, client: str) -> Record | None:
        return self.ledger.find(id_, None if client == "" else client)

    def progress(self, record: Record) -> JobProgress:
        return self._progress.get(record.id, JobProgress())

    def cancel(self, id_: str) -> None:
        state = self.ledger.cancel(id_, "cancelled by the client")
        if state in ("leased", "running"):
            self._scheduler.cancel_job(id_)
        elif state == "submitted":
            self.remove_inputs(id_)
        self._forget(id_)

    def remove(self, record: Record) -> None:
        """Ends the job, and removes its files."""
        self.cancel(record.id)
        now = self.ledger.find(record.id) or record  # it may have been finished since it was looked at
        self._remove_outputs(now.outputs)
        self.remove_inputs(record.id)
        self.ledger.remove(record.id)

    def _remove_outputs(self, outputs: Iterable[OutputFile]) -> None:
        for output in outputs:
            (self.config.directory / output.name).unlink(missing_ok=True)

    def output_path(self, record: Record, index: int) -> Path | None:
        """The file of a finished job; None where there is none."""
        if record.state != "done" or not 0 <= index < len(record.outputs):
            return None
        path = self.config.directory / record.outputs[index].name
        return path if path.is_file() else None

    def _on_event(self, event: Event) -> None:
        self.activity.note(event)
        if event.stage == "denoising" and event.done:
            self._is_ready.set()
        for id_, preview in zip(event.jobs, event.previews or itertools.repeat(b""), strict=False):
            before = self._progress.get(id_) or self._begin_progress(id_)
            self._progress[id_] = before.follow(event, preview)

    def _begin_progress(self, id_: str) -> JobProgress:
        record = self.ledger.find(id_)
        model = None if record is None else self.models.get(record.request.model)
        if record is not None and model is not None and "upscale" in record.request.values:
            with contextlib.suppress(InvalidValueError):  # of a server that took other values
                passes = model.passes(record.request.values)
                return JobProgress(steps=tuple(each.num_inference_steps for each in passes))
        return JobProgress()

    def _on_outcome(self, outcome: Outcome, state: str) -> None:
        if outcome.id == WARM_UP:
            self._remove_outputs(outcome.outputs)
            self.activity.end(dataclasses.replace(outcome, seconds={}), "")
            if outcome.state == "done":
                self._is_ready.set()  # events of a worker elsewhere come together, and only the last is kept
            if outcome.state == "failed":
                logger.error("the first step failed: %s", outcome.error)
                self._fail(outcome.error)
            return
        self._forget(outcome.id)
        self.activity.end(outcome, state)
        if self._tracer is not None:
            record_job(self._tracer, outcome.id, state, outcome.seconds)
        if state in OVER:  # they may be large, and nobody needs them again
            self.remove_inputs(outcome.id)
        if state == "done" and (record := self.ledger.find(outcome.id)) is not None:
            self._record_time(record)
        if state == "cancelled":  # its client did not wait for the file
            self._remove_outputs(outcome.outputs)
        reason = f": {outcome.error}" if state == "failed" else ""  # with the paths that clients do not see
        logger.info("job %s: %s%s", outcome.id, state, reason, extra={"job": outcome.id, "state": state})

    def _forget(self, id_: str) -> None:
        self._progress.pop(id_, None)

    def remove_inputs(self, id_: str) -> None:
        for path in self.inputs.glob(f"{id_}-*"):
            path.unlink(missing_ok=True)


def _suffix(kind: Kind) -> str:
    return ".png" if kind == "image" else ".mp4"
