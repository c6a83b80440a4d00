"""The jobs of clients: accepted, looked at, cancelled, removed; one worker in this process carries them out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.settings import make_settings
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import NewJob
from comfy_tpu.jobs.opening import choose_settings
from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.jobs.preview_rate import PreviewRate
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.served_ledger import Kind, Order, Record, ServedLedger
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.serving.activity import Activity
from comfy_tpu.serving.admission import Admission
from comfy_tpu.serving.config import ServeConfig
from comfy_tpu.serving.estimates import Estimator
from comfy_tpu.serving.given_files import check_uploads, sort_uploads
from comfy_tpu.serving.orders import make_request
from comfy_tpu.serving.planner import Planner
from comfy_tpu.serving.scheduler import JobWorkers, Scheduler
from comfy_tpu.serving.tracing import record_job
from comfy_tpu.serving.warm_up import WARM_UP, make_warm_up

if TYPE_CHECKING:
    from comfy_tpu.pipeline.model_files import ModelFiles
    from comfy_tpu.serving.uploads import Upload

logger = logging.getLogger(__name__)

STAGE_PREFIX = "stage_"
_JOB_FILE = re.compile(r"(video|image|stage)_[0-9a-f]{24}")
_SWEEP_SECONDS = 60.0
_STRAY_SECONDS = 3600.0
_LEARNED = 50
"""Jobs of earlier servers whose times are taken over."""
_RETRY_SECONDS = 10.0
"""Where no job was measured yet."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    name: str
    card: ModelCard
    defaults: GenerationSettings
    files: ModelFiles | None = None

    @property
    def kind(self) -> Kind:
        return "image" if self.card.makes_images else "video"


@dataclasses.dataclass(frozen=True)
class JobProgress:
    stage: str = "queued"
    done: int = 0
    total: int = 0
    preview: bytes = b""
    """The latest, a JPEG file; empty: none yet."""
    report: Progress | None = None
    """As the pipeline made it."""

    @property
    def percent(self) -> int:
        """Of the steps: what comes before and after them is short."""
        return 100 * self.done // self.total if self.stage == "denoising" and self.total else 0


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
        self.folder = Folder(str(config.directory))
        self.folder.prepare()
        self.inputs = config.directory / "inputs"
        self.inputs.mkdir(exist_ok=True)
        self.ledger = ServedLedger(self.folder.ledger_path)
        self.started_at = time.time()
        self._progress: dict[str, JobProgress] = {}
        self._is_ready = threading.Event()
        self._is_closed = threading.Event()
        self.activity = Activity()
        self.estimator = Estimator(planner)
        self._admission = Admission(planner, self.estimator, config.limits.job_seconds)
        self._tracer = tracer
        self.failure = ""
        """Why no job can be carried out."""
        self.on_failure: Callable[[], None] = lambda: None
        self._workers = make_workers(self.folder)
        first = next(iter(models.values()))
        self._scheduler = Scheduler(
            self.ledger,
            self.folder,
            self._workers,
            first=make_warm_up(first.name, first.card, first.defaults, config.common, self.inputs),
            on_given=lambda jobs: self.activity.begin(job.id for job in jobs),
            on_event=self._on_event,
            on_outcome=self._on_outcome,
        )
        self._sweeper = threading.Thread(target=self._sweep, name="retention", daemon=True)

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
            with contextlib.suppress(InvalidValueError):  # of a server that took other values
                self.estimator.record(model.name, _settings(record.request, model), seconds)

    def close(self) -> None:
        """Running jobs are given back, for the next server."""
        self._is_closed.set()
        self._scheduler.close()
        self.ledger.close()

    @property
    def is_ready(self) -> bool:
        """Whether a step was made in this process, and the next would be."""
        return self._is_ready.is_set() and self._scheduler.failure is None

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
        """The job of an order, which is in the ledger by then. Raises InvalidValueError, QueueFullError or
        KeyUsedError."""
        model = self.find_model(body.get("model"))
        if model.kind != kind:
            raise InvalidValueError(f"model={model.name} makes {model.kind}s, not {kind}s", field="model")
        id_ = f"{kind}_{secrets.token_hex(12)}"
        places = {upload: self.inputs / f"{id_}-{number}" for number, upload in enumerate(uploads)}
        media = {name: [places[each] for each in given] for name, given in sort_uploads(model.card, uploads).items()}
        request = make_request({**body, "model": model.name}, self.config, model.card, model.defaults, media)
        request = check_uploads(request, model, uploads)
        seconds = self._admission.admit(model.name, model.card, _settings(request, model))
        said = json.dumps([dict(body), [[each.given, each.digest] for each in uploads]], sort_keys=True)
        order = Order(client, kind, key, hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest(), seconds)
        for upload, path in places.items():
            upload.path.replace(path)
        try:
            job = NewJob(id_, 0, request, f"{id_}{_suffix(kind)}")
            accepted = self.ledger.accept(job, order, queue_limit=self.config.limits.queued_jobs)
        except BaseException:
            self.remove_inputs(id_)
            raise
        if accepted != id_:
            self.remove_inputs(id_)
        prompt = {"prompt": request.prompt} if self.config.logs_prompts else {}
        facts = {"job": accepted, "client": client, "model": model.name, **prompt}
        logger.info("job %s: accepted", accepted, extra=facts)
        record = self.ledger.find(accepted)
        assert record is not None
        return record

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
        if self.ledger.cancel(id_, "cancelled by the client") in ("leased", "running"):
            self._scheduler.cancel_job(id_)  # of others a worker would remember the id for ever
        self._forget(id_)

    def remove(self, record: Record) -> None:
        """Ends the job, and removes its files."""
        self.cancel(record.id)
        for output in record.outputs:
            (self.config.directory / output.name).unlink(missing_ok=True)
        self.remove_inputs(record.id)
        self.ledger.remove(record.id)

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
            shown = preview or self._progress.get(id_, JobProgress()).preview
            self._progress[id_] = JobProgress(event.stage, event.done, event.total, shown, event.progress)

    def _on_outcome(self, outcome: Outcome, state: str) -> None:
        if outcome.id == WARM_UP:
            for output in outcome.outputs:
                (self.config.directory / output.name).unlink(missing_ok=True)
            self.activity.end(dataclasses.replace(outcome, seconds={}), "")
            if outcome.state == "done":
                self._is_ready.set()  # events of a worker elsewhere come together, and only the last is kept
            if outcome.state == "failed":
                logger.error("the first step failed: %s", outcome.error)
                self.failure = outcome.error
                self.on_failure()
            return
        self._forget(outcome.id)
        self.activity.end(outcome, state)
        if self._tracer is not None:
            record_job(self._tracer, outcome.id, state, outcome.seconds)
        if outcome.id.startswith(STAGE_PREFIX):  # they are large, and nobody needs them again
            record = self.ledger.find(outcome.id)
            if record is None or record.state in self.activity.finished:
                self.remove_inputs(outcome.id)
        elif state == "done" and (record := self.ledger.find(outcome.id)) is not None:
            self._record_time(record)
        if state == "cancelled":  # its client did not wait for the file
            for output in outcome.outputs:
                (self.config.directory / output.name).unlink(missing_ok=True)
        logger.info("job %s: %s", outcome.id, state, extra={"job": outcome.id, "state": state})

    def _remove_strays(self) -> None:
        """Inputs that no job has: their server was killed while they came. Those of another may be coming."""
        for path in self.inputs.iterdir():
            with contextlib.suppress(OSError):
                is_old = time.time() - path.stat().st_mtime > _STRAY_SECONDS
                if is_old and self.ledger.find(path.name.partition("-")[0]) is None:
                    path.unlink()

    def _remove_stray_outputs(self) -> None:
        """Files of jobs that were cancelled or removed: their server was killed before it removed the file."""
        for path in self.config.directory.iterdir():
            if (match := _JOB_FILE.match(path.name)) is None:
                continue
            record = self.ledger.find(match[0])
            if record is None or record.state in ("failed", "cancelled"):
                path.unlink(missing_ok=True)

    def _forget(self, id_: str) -> None:
        self._progress.pop(id_, None)

    def remove_inputs(self, id_: str) -> None:
        for path in self.inputs.glob(f"{id_}-*"):
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        self._remove_stray_outputs()
        while not self._is_closed.wait(_SWEEP_SECONDS):
            self.enforce_retention()

    def enforce_retention(self) -> None:
        """Removes what is too old, and the oldest files beyond the limit of bytes."""
        kept = self.config.retention
        for record in self.ledger.finished_before(time.time() - kept.seconds):
            self.remove(record)
        self._remove_strays()
        total = 0
        for id_, size in self.ledger.finished_bytes():
            total += size
            if total > kept.bytes and (found := self.ledger.find(id_)) is not None:
                self.remove(found)


def _settings(request: Request, model: ServedModel) -> GenerationSettings:
    return make_settings(model.defaults, choose_settings(request.values, model.card.presets), model.card.limits)


def _suffix(kind: Kind) -> str:
    return ".png" if kind == "image" else ".mp4"


def open_served_model(name: str) -> ServedModel:
    """Finds a model, and downloads it if needed."""
    from comfy_tpu.pipeline.model_files import ModelFiles

    files = ModelFiles.open(name)
    return ServedModel(name, files.family.card, files.defaults, files)
