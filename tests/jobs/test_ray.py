"""Batches on Ray: workers and drivers that die, machines that come and go, slices. Ray takes 5 s to start."""

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from PIL import Image

from comfy_tpu.cli.main import main
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.driver import ModelFacts
from comfy_tpu.jobs.folder import Folder, hash_file
from comfy_tpu.jobs.ray_cluster import Cluster, _check_address
from comfy_tpu.jobs.ray_workers import RayConfig, RayWorkers
from comfy_tpu.jobs.request import Request
from comfy_tpu.pipeline.media import read_metadata
from tests.jobs.ray_processes import (
    HERE,
    SOURCE,
    BatchProcess,
    command_line,
    find_processes,
    kill,
    read_attempts,
    read_results,
    read_states,
    write_jobs,
)
from tests.waiting import wait_for

pytest.importorskip("ray", reason="an extra that make test does not install: pip install '.[ray]'")

# A cluster of the tests forks, and the tests of another file may have started jax in this process.
pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")


@pytest.fixture
def start(tmp_path):
    """Starts batches whose processes are gone at the end of the test, whatever happens."""
    started = []

    def start(*arguments, **options):
        started.append(BatchProcess(*arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


def check_images(output, count, size=(8, 8)):
    """Every job's image is whole, and is its own."""
    results = read_results(output)
    assert len(results) == count
    assert {result["state"] for result in results} == {"done"}
    for result in results:
        (file,) = result["outputs"]
        assert hash_file(output / file["name"]) == file["sha256"]
        metadata, request = read_metadata(output / file["name"]), result["request"]
        assert (metadata["prompt"], metadata["seed"]) == (request["prompt"], str(request["seed"]))
        with Image.open(output / file["name"]) as image:
            image.load()
            assert image.size == size
    names = {path.name for path in output.iterdir()} - {".comfy-tpu", "results.jsonl"}
    assert names == {result["outputs"][0]["name"] for result in results}


def list_images(output):
    return list(output.glob("*.png"))


def test_an_address_that_is_none():
    with pytest.raises(InvalidValueError, match="ray=nowhere is neither auto nor HOST:PORT; give the address that"):
        _check_address("nowhere")


def test_nobody_at_the_address():
    with pytest.raises(InvalidValueError, match=r"ray=127.0.0.1:9: no cluster answers there \(.*\); give"):
        _check_address("127.0.0.1:9")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers", "0"), "--workers 0 is no number of workers; give 1 or more"),
        (("--slice", "v6e-16"), "--slice v6e-16 is part of a cluster; give --ray auto or --ray HOST:PORT too"),
        (("--ray", "nowhere"), "--ray nowhere is neither auto nor HOST:PORT"),
    ],
)
def test_the_command_refuses(flags, message, tmp_path, capsys):
    jobs = write_jobs(tmp_path / "jobs.jsonl", 1)
    assert main(["batch", str(jobs), "-o", str(tmp_path / "out"), *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_batch_of_three_workers(start, tmp_path):
    output = tmp_path / "out"
    batch = start(write_jobs(tmp_path / "jobs.jsonl", 40), output, "--workers", "3", "--json", STAND_IN_SECONDS="0.5")
    status, text, errors = batch.finish()
    assert status == 0, errors
    events = [json.loads(line) for line in text.splitlines()]
    assert events[-1]["event"] == "summary"
    assert events[-1]["done"] == 40
    check_images(output, 40)
    assert len({result["worker"] for result in read_results(output)}) == 3
    assert batch.processes() == []  # at once: the command waits for its workers


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_but_time(start, tmp_path):
    output = tmp_path / "out"
    batch = start(write_jobs(tmp_path / "jobs.jsonl", 40), output, "--workers", "2", STAND_IN_SECONDS="0.3")
    wait_for(lambda: len(list_images(output)) > 5, what="images")
    assert kill(batch.actors()[0])
    status, _, errors = batch.finish()
    assert status == 0, errors
    assert "Traceback" not in errors
    assert "raylet" not in errors
    check_images(output, 40)
    assert set(read_attempts(output)) == {1}  # a death is no failed attempt
    assert batch.processes() == []


@pytest.mark.slow
def test_preemption_returns_the_job_and_replaces_the_worker(start, tmp_path):
    output = tmp_path / "out"
    batch = start(write_jobs(tmp_path / "jobs.jsonl", 20), output, "--workers", "2", STAND_IN_SECONDS="1")
    wait_for(lambda: len(list_images(output)) > 2, what="images")
    first = batch.actors()
    assert kill(first[0], signal.SIGTERM)
    wait_for(lambda: set(batch.actors()) - set(first), what="another worker")
    status, _, errors = batch.finish()
    assert status == 0, errors
    check_images(output, 20)


@pytest.mark.slow
def test_a_worker_without_progress_is_killed(start, tmp_path):
    output = tmp_path / "out"
    environment = {"STAND_IN_HANG": "job 7", "STAND_IN_HUNG": str(tmp_path / "hung"), "STAND_IN_STALL": "5"}
    batch = start(write_jobs(tmp_path / "jobs.jsonl", 20), output, "--workers", "2", **environment)
    status, _, errors = batch.finish()
    assert status == 0, errors
    assert (tmp_path / "hung").exists()
    check_images(output, 20)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_batch_leaves_no_process(number, start, tmp_path):
    output = tmp_path / "out"
    jobs = write_jobs(tmp_path / "jobs.jsonl", 200)
    batch = start(jobs, output, "--workers", "2", STAND_IN_SECONDS="0.5")
    wait_for(lambda: len(list_images(output)) > 2, what="images")
    os.killpg(batch.process.pid, number) if number == signal.SIGINT else batch.process.send_signal(number)
    status, _, errors = batch.finish()
    assert status == 128 + number, errors
    assert "Traceback" not in errors
    assert batch.processes() == []
    assert set(read_states(output)) == {"done", "submitted"}


class Killer(threading.Thread):
    """Kills one of the batches' workers every few seconds, or, on a busy machine, after a few images."""

    def __init__(self, batches, output, seconds, images):
        super().__init__(daemon=True)
        self._batches = batches
        self._output = output
        self._seconds = seconds
        self._images = images
        self._stopped = threading.Event()
        self.killed = 0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self._stopped.set()
        self.join()

    def run(self):
        before = 0
        while not self._stopped.wait(self._seconds):
            actors = [actor for batch in list(self._batches) for actor in batch.actors()]
            if actors and len(list_images(self._output)) >= before + self._images:
                before = len(list_images(self._output))
                self.killed += kill(random.choice(actors))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


TINY = {"height": 16, "width": 16, "num_frames": 1, "num_inference_steps": 1}
"""The least that the demo model makes. A worker that is started again takes 100 times as long as a job."""


@pytest.mark.slow
@pytest.mark.parametrize("has_model", [False, True], ids=["stand-in", "demo model"])
def test_chaos(has_model, start, tmp_path, small_disk):
    count, output = 300, small_disk / "out"
    jobs = write_jobs(tmp_path / "jobs.jsonl", count, **(TINY if has_model else {}))
    options = {"script": None, "JAX_PLATFORMS": "cpu"} if has_model else {"STAND_IN_SECONDS": "0.2"}
    batches = []

    def run(*flags):
        batches.append(start(jobs, output, "--workers", "3", *flags, **options))
        return batches[-1]

    with Killer(batches, output, 3.0, 5) as killer:
        for _ in range(5):
            before = len(list_images(output)) if output.exists() else 0
            batch = run()
            wait_for(lambda before=before: len(list_images(output)) >= before + 20, what="20 more images")
            batch.kill()

        batch = run()
        before = len(list_images(output))
        wait_for(lambda: len(list_images(output)) >= before + 5, what="5 more images")
        filler = small_disk / "filler"
        # Without a buffer, which would be written again when the file is closed.
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        status, _, errors = batch.finish()
        assert status == 1, errors
        assert "Traceback" not in errors
        assert "No space left" in errors or "full" in errors
        filler.unlink()

        first, second = run(), run()
        for batch in (first, second):
            status, _, errors = batch.finish()
            assert status == 0, errors
    assert killer.killed >= 5
    check_images(output, count, (16, 16) if has_model else (8, 8))
    assert read_states(output) == {"done": count}
    assert set(read_attempts(output)) == {1}  # each was finished once
    for batch in batches:
        wait_for(lambda batch=batch: batch.processes() == [], 120, "the end of all processes")


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """A cluster of several nodes on this machine, without CPUs of its own."""
    import ray
    from ray.cluster_utils import Cluster as FakeCluster

    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}:{HERE}")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    fake = FakeCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield fake
    ray.shutdown()
    fake.shutdown()


def open_workers(cluster, output, **config):
    said = []
    folder = Folder(str(output))
    config = RayConfig(address=cluster.address, worker_module="ray_stand_in", **config)
    workers = RayWorkers(folder, config, batch_size=1, report=said.append)
    return workers, said


def ready(workers):
    workers._happened = workers.wait(0.1)
    return [worker for worker in workers._workers if worker.is_ready]


@pytest.mark.slow
def test_nodes_come_and_go(cluster, tmp_path):
    cluster.add_node(num_cpus=1)
    workers, said = open_workers(cluster, tmp_path / "out", workers=2)
    try:
        wait_for(lambda: len(ready(workers)) == 1, what="the first worker")
        assert "2 workers are wanted and the cluster has 1 CPU worker: the others start with it" in said
        assert workers.find_model_facts(Request({"prompt": "x"})) == ModelFacts("stand-in", makes_images=True)
        node = cluster.add_node(num_cpus=1)
        wait_for(lambda: len(ready(workers)) == 2, what="the second worker")
        cluster.remove_node(node)
        wait_for(lambda: len(ready(workers)) == 1, what="the loss of a worker")
    finally:
        workers.close()


@pytest.mark.slow
def test_another_version_of_ray(cluster, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "__version__", "1.2.3")
    with pytest.raises(ComfyTpuError, match=r"the cluster has other versions than this machine \(Ray .*, Ray 1.2.3"):
        Cluster(cluster.address)


def add_slice(cluster, name, topology, numbers, **environment):
    """Hosts of four chips, by their numbers in the slice, in the order in which they join."""
    for number in numbers:
        resources = {"TPU": 4, **({f"TPU-{name}-head": 1} if number == 0 else {})}
        variables = {
            "TPU_NAME": "slice-a",
            "TPU_WORKER_ID": str(number),
            "TPU_ACCELERATOR_TYPE": name,
            "TPU_TOPOLOGY": topology,
            "MEGASCALE_NUM_SLICES": "2",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            **environment,
        }
        labels = {
            "ray.io/tpu-slice-name": "slice-a",
            "ray.io/tpu-pod-type": name,
            "ray.io/tpu-topology": topology,
            "ray.io/tpu-worker-id": str(number),
        }
        cluster.add_node(num_cpus=2, resources=resources, labels=labels, env_vars=variables)


def read_records(records):
    return [json.loads(path.read_text()) for path in Path(records).glob("*.json")]


@pytest.mark.slow
def test_a_slice_is_one_worker(cluster, tmp_path):
    add_slice(cluster, "v6e-16", "4x4", (2, 0, 3, 1), STAND_IN_RECORDS=str(tmp_path))
    with pytest.raises(InvalidValueError, match=r"slices of several hosts \(v6e-16\).*; give --slice v6e-16"):
        open_workers(cluster, tmp_path / "out")
    workers, _ = open_workers(cluster, tmp_path / "out", slice_name="v6e-16")
    try:
        (worker,) = wait_for(lambda: ready(workers), what="a slice")
        records = read_records(tmp_path)
        assert len(worker.actors) == len(records) == 4
        assert {record["process_id"] for record in records} == {0, 1, 2, 3}
        assert all(record["worker"] == str(record["process_id"]) for record in records)
        assert len({record["coordinator"] for record in records}) == 1
        assert {record["num_processes"] for record in records} == {4}
        assert all(record["stale"] == [] for record in records)

        kill(records[2]["process"])  # the replica is lost as a whole, and started anew as a whole
        wait_for(lambda: worker not in ready(workers), what="the loss of the slice")
        wait_for(lambda: ready(workers), what="another replica")
        assert len(read_records(tmp_path)) == 8
    finally:
        workers.close()


@pytest.mark.slow
def test_a_slice_makes_the_videos_of_one_process(cluster, start, tmp_path):
    """Two hosts of two CPU devices each, taken for a v5p-16, with the demo model; one of them dies on the way."""
    flags = ("--mesh", "dp=2,sp=2", "--batch-size", "1")
    values = {"num_inference_steps": 2, "num_frames": 5}
    jobs = tmp_path / "jobs.jsonl"
    lines = [{"prompt": f"job {n}", "seed": n, "output": f"{n}.npy", **values} for n in range(6)]
    jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone, output = tmp_path / "alone", tmp_path / "out"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    status, _, errors = start(jobs, alone, *flags, script=None, **environment).finish()
    assert status == 0, errors

    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    mark = "COMFY_TPU_TEST_MARK=slice"
    add_slice(cluster, "v5p-16", "2x2x2", (1, 0), **dict([mark.split("=")]), **environment)
    batch = start(jobs, output, *flags, "--ray", cluster.address, "--slice", "v5p-16", script=None)
    wait_for(lambda: len(list(output.glob("*.npy"))) >= 2 or batch.process.poll() is not None, 900, "two videos")
    actors = [each for each in find_processes(mark) if command_line(each).startswith(b"ray::JobActor")]
    assert len(actors) == 2, batch.finish()
    assert kill(actors[-1])
    status, _, errors = batch.finish()
    assert status == 0, errors
    assert read_states(output) == {"done": 6}
    for line in lines:
        assert (output / line["output"]).read_bytes() == (alone / line["output"]).read_bytes()
    wait_for(lambda: not find_processes(batch.mark), 120, "the end of the driver")
