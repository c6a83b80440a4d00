"""The actor's side, in this process and without Ray."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comfy_tpu.config import Lora
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs import ray_actor, ray_cluster, ray_workers
from comfy_tpu.jobs.driver import ModelFacts
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.outcome import Event
from comfy_tpu.jobs.ray_actor import ActorSetup, JobActor, ModelRefusal
from comfy_tpu.jobs.ray_cluster import Place, find_places, find_slices, import_ray
from comfy_tpu.jobs.ray_slices import parse_slice_name
from comfy_tpu.jobs.ray_workers import STALL_SECONDS, RayConfig, RayWorkers, resolve_paths
from comfy_tpu.jobs.request import Request, parse_lora
from tests.jobs.ray_processes import SOURCE
from tests.waiting import wait_for

MODULE = "tests.jobs.ray_stand_in"


def make_job(number, **values):
    return Job(f"id-{number}", Request({"prompt": f"job {number}", **values}), f"{number}.png", 1)


@pytest.fixture
def make_actor(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    actors = []

    def make(output, module=MODULE, **options):
        actors.append(JobActor(ActorSetup("worker-1", str(output), 1, module, str(scratch), **options)))
        return actors[-1]

    directory = ray_actor.tempfile.tempdir
    yield make
    ray_actor.tempfile.tempdir = directory
    signal.signal(signal.SIGTERM, before)
    for actor in actors:
        if actor._thread is not None:
            actor._thread.cancel()
            actor._thread.close()


def collect(actor, count):
    """Outcomes and events, until there are so many outcomes."""
    outcomes, events = [], []
    while len(outcomes) < count:
        for item in actor.happened(5.0).happened:
            (events if isinstance(item, Event) else outcomes).append(item)
    return outcomes, events


def test_files_of_a_local_directory_are_returned(make_actor, tmp_path):
    actor = make_actor(tmp_path / "batch")
    actor.give([make_job(1), make_job(2)])
    outcomes, _ = collect(actor, 2)
    assert [outcome.id for outcome in outcomes] == ["id-1", "id-2"]
    for outcome in outcomes:
        ((name, content),) = outcome.contents
        assert outcome.outputs[0].name == name
        assert len(content) == outcome.outputs[0].size
        assert content.startswith(b"\x89PNG")
    assert not (tmp_path / "batch").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_previews_of_jobs_that_the_driver_says_are_watched(make_actor, tmp_path):
    actor = make_actor(tmp_path / "batch", makes_previews=True)
    actor.happened(0.0, ("id-2",))
    actor.give([make_job(number) for number in (1, 2, 3)])
    shown, ended = {}, 0
    while ended < 3:
        for item in actor.happened(5.0, ("id-2",)).happened:
            if isinstance(item, Event):
                shown.update(dict(zip(item.jobs, item.previews, strict=False)))
            else:
                ended += 1
    assert shown == {"id-2": b"a preview"}


def test_a_preview_is_kept_though_the_next_step_is_told_with_it(make_actor, tmp_path, monkeypatch):
    """Of a group's events only the last is sent."""
    actor = make_actor(tmp_path / "batch", makes_previews=True)
    told = [Event("w", "denoising", "", done, 2, ("a",), (b"seen",) if done == 1 else ()) for done in (1, 2)]
    actor._thread = type("Thread", (), {"wait": lambda self, seconds: told})()
    actor._is_started.set()
    (event,) = actor.happened(0.1).happened
    assert (event.done, event.previews) == (2, (b"seen",))
    actor._thread = None


def test_a_remote_directory_is_written_by_the_actor(make_actor, tmp_path):
    actor = make_actor(f"local://{tmp_path}/batch")
    actor.give([make_job(1)])
    (outcome,), _ = collect(actor, 1)
    assert outcome.contents == ()
    assert (tmp_path / "batch" / "1.png").stat().st_size == outcome.outputs[0].size


def test_termination_returns_jobs_and_ends_the_process(make_actor, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_SECONDS", "4")
    ended = []
    monkeypatch.setattr(ray_actor.os, "_exit", ended.append)
    actor = make_actor(tmp_path / "batch")
    actor.give([make_job(1), make_job(2)])
    actor.give([make_job(3)])
    wait_for(lambda: actor.happened(1.0).happened)
    os.kill(os.getpid(), signal.SIGTERM)
    outcomes, _ = collect(actor, 3)
    assert {(outcome.id, outcome.state) for outcome in outcomes} == {(f"id-{n}", "returned") for n in (1, 2, 3)}
    wait_for(lambda: actor.happened(0.1).is_ending)
    wait_for(lambda: ended == [0])


def test_an_actor_that_cannot_carry_out_jobs_says_why(make_actor, tmp_path):
    actor = make_actor(tmp_path / "batch", "no_such_module")
    actor.give([make_job(1)])
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        actor.happened(5.0)


def test_model_facts_and_refusals_are_plain_data(make_actor, tmp_path, monkeypatch):
    actor = make_actor(tmp_path / "batch")
    assert actor.find_model_facts(Request({"prompt": "x"})) == ModelFacts("stand-in", makes_images=True)

    def refuse(request):
        raise InvalidValueError("model=x is unknown", field="model")

    monkeypatch.setattr(f"{MODULE}.find_model_facts", refuse)
    refusal = actor.find_model_facts(Request({"prompt": "x"}))
    assert refusal == ModelRefusal("model=x is unknown", "model", True)


def test_variables_of_other_programs_are_cleared(make_actor, tmp_path, monkeypatch):
    for name in ("MEGASCALE_NUM_SLICES", "TPU_PROCESS_BOUNDS", "CLOUD_TPU_TASK_ID", "TPU_VISIBLE_CHIPS", "TPU_NAME"):
        monkeypatch.setenv(name, "1")
    make_actor(tmp_path / "batch")
    left = {name for name in os.environ if name.startswith(("MEGASCALE", "TPU_", "CLOUD_TPU"))}
    assert left >= {"TPU_VISIBLE_CHIPS", "TPU_NAME"}
    assert not left & {"MEGASCALE_NUM_SLICES", "TPU_PROCESS_BOUNDS", "CLOUD_TPU_TASK_ID"}


def node(name, labels=None, **resources):
    return {"NodeID": name, "Resources": resources, "Labels": labels or {}}


@pytest.mark.parametrize(
    ("nodes", "is_cpu_shared", "expected"),
    [
        ([node("a", CPU=4.0), node("b", CPU=2.0)], False, [Place("cpu", "a"), Place("cpu", "b")]),
        ([node("a", CPU=2.0)], True, [Place("cpu", "a")] * 2),
        ([node("a", CPU=0.0)], False, []),
        ([node("a", GPU=2.0)], False, [Place("gpu", "a")] * 2),
        ([node("a", {"ray.io/tpu-pod-type": "v6e-8"}, TPU=8.0)], False, [Place("tpu", "a", 8.0)]),
        ([node("a", {"ray.io/tpu-pod-type": "v6e-16"}, TPU=4.0)], False, []),
    ],
)
def test_places(nodes, is_cpu_shared, expected):
    assert list(find_places(nodes, is_cpu_shared=is_cpu_shared)) == expected


def test_slices_of_several_hosts_are_found():
    nodes = [node("a", {"ray.io/tpu-pod-type": "v6e-16"}, TPU=4.0), node("b", {"ray.io/tpu-pod-type": "v6e-8"}, TPU=8)]
    assert find_slices(nodes) == {"v6e-16"}


def test_paths_are_sent_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("image.png", "lora.safetensors"):
        Path(name).touch()
    (tmp_path / "model").mkdir()
    sent = resolve_paths(
        Request({"image": ["image.png", "gs://b/x.png"], "lora": ["lora.safetensors:0.5"], "model": "model"})
    )
    here = str(tmp_path)
    assert sent.values == {
        "image": [f"{here}/image.png", "gs://b/x.png"],
        "lora": [f"{here}/lora.safetensors:0.5"],
        "model": f"{here}/model",
    }
    assert resolve_paths(Request({"model": "demo"})).values == {"model": "demo"}


def test_a_path_with_colons_is_no_strength_elsewhere(tmp_path):
    """A worker may not see the file by which the driver knows."""
    file = tmp_path / "style:0.5"
    file.touch()
    (sent,) = resolve_paths(Request({"lora": [str(file)]})).values["lora"]
    file.unlink()
    assert parse_lora(sent) == Lora(file)


class FakeWorker:
    def __init__(self, groups=0, is_ready=True):
        self.groups = [{str(n)} for n in range(groups)]
        self.is_ready = is_ready
        self.last = None


@pytest.mark.parametrize(
    ("groups", "waiting", "expected"),
    [
        ([0, 0, 0, 0], 4, 1),  # one for each
        ([0, 0, 0, 0], 100, 8),  # no more than a step can have
        ([0, 0, 0, 0], 20, 5),
        ([0], 1, 1),
        ([1, 1, 1, 1], 3, 0),  # whoever is free first takes them
        ([1, 1, 1, 1], 40, 8),  # the next group, while the first is running
        ([2, 2], 40, 0),
    ],
)
def test_jobs_are_shared(groups, waiting, expected):
    workers = RayWorkers.__new__(RayWorkers)
    workers._workers = list(map(FakeWorker, groups))
    workers._group_size = 8
    assert workers.capacity(waiting) == expected


def test_workers_that_have_not_started_get_no_jobs():
    workers = RayWorkers.__new__(RayWorkers)
    workers._workers, workers._group_size = [FakeWorker(is_ready=False)], 8
    assert workers.capacity(10) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 0}, "workers=0 is no number of workers; give 1 or more"),
        ({"workers": "x"}, "workers=x is no number of workers; give 1 or more"),
        ({"slice_name": "v6e-16"}, "slice=v6e-16 is part of a cluster; give --ray auto or --ray HOST:PORT too"),
        ({"slice_name": "v9-1", "address": "auto"}, "slice='v9-1': unknown generation 'v9'"),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(InvalidValueError, match=message):
        RayConfig(**values)


def test_directories_of_killed_drivers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster.tempfile, "tempdir", str(tmp_path))
    code = "import os, signal; from comfy_tpu.jobs import ray_cluster\n"
    code += "with ray_cluster._make_scratch(): os.kill(os.getpid(), signal.SIGKILL)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    (abandoned,) = tmp_path.iterdir()
    with ray_cluster._make_scratch() as first, ray_cluster._make_scratch() as second:
        assert not abandoned.exists()
        assert {str(path) for path in tmp_path.iterdir()} == {first, second}  # one that is in use stays
    assert list(tmp_path.iterdir()) == []


def test_slice_names_are_googles():
    assert parse_slice_name("v5litepod-16").name == "v5e-16"


def test_ray_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ComfyTpuError, match=f"ray is not installed; {re.escape(install_command('ray'))}"):
        import_ray()


class SilentRay:
    """A Ray whose actors start and never answer."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self) -> None:
        self.actors = list[Any]()
        self.killed = list[Any]()
        self.timeouts = list[float | None]()

    def remote(self, **_: Any) -> Any:
        return lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, setup: Any) -> Any:
        ask = SimpleNamespace(remote=lambda *_: object())
        self.actors.append(SimpleNamespace(hello=ask, find_model_facts=ask))
        return self.actors[-1]

    def wait(self, refs: Any, **_: Any) -> Any:
        return [], refs

    def get(self, ref: Any, *, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        raise RuntimeError("no answer")

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> SilentRay:
    ray = SilentRay()
    place = Place("tpu", "node", 4.0)
    cluster = SimpleNamespace(places=lambda **_: [place], nodes=list, close=lambda: None, scratch=None)
    monkeypatch.setattr(ray_workers, "import_ray", lambda: ray)
    monkeypatch.setattr(ray_workers, "Cluster", lambda *_, **__: cluster)
    monkeypatch.setattr(Place, "options", lambda self: {})
    monkeypatch.setattr(ray_workers, "_is_death", lambda error: False)
    return ray


def test_an_actor_that_never_answers_is_given_up(silent: SilentRay, tmp_path: Path) -> None:
    said = list[str]()
    config = RayConfig(address="auto", stall_seconds={**STALL_SECONDS, "starting": 0.0})
    with contextlib.closing(RayWorkers(Folder(str(tmp_path)), config, batch_size=1, report=said.append)) as workers:
        (actor,) = silent.actors
        workers.wait(0.0)
        assert silent.killed == [actor]
        assert said == ["worker-1 is given up: no progress for 0 s in stage starting"]
        assert workers._workers == []


def test_no_answer_is_waited_for_without_end(silent: SilentRay, tmp_path: Path) -> None:
    with contextlib.closing(
        RayWorkers(Folder(str(tmp_path)), RayConfig(address="auto"), batch_size=1, report=print)
    ) as workers:
        (worker,) = workers._workers
        worker.is_ready = True
        silent.wait = lambda refs, **_: (refs, [])  # type: ignore[method-assign]
        workers._receive(0.0)
        assert silent.timeouts == [STALL_SECONDS["decoding"]]
        assert workers._workers == []
