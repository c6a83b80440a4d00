"""kill -9 of the server, or of its workers, under load: every accepted job ends exactly once."""

import collections
import contextlib
import hashlib
import http.client
import itertools
import json
import os
import random
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ray_processes import command_line, find_processes, kill

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KILLS = 50


class Servers:
    """One server after the other on one port and one directory."""

    def __init__(self, directory: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.directory, self._log = directory, log
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with log.open("ab") as errors:
            self._starter = subprocess.Popen(
                [sys.executable, "-m", "tests.serving.stand_in_server"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._process: int | None = None

    def _say(self, line: str) -> str:
        assert self._starter.stdin is not None
        assert self._starter.stdout is not None
        self._starter.stdin.write(f"{line}\n")
        self._starter.stdin.flush()
        while not (answer := self._starter.stdout.readline().strip()).isalnum():  # the server says where it is
            assert self._starter.poll() is None
        return answer

    def start(self) -> None:
        self._process = int(self._say(f"serve demo -d {self.directory} --port {self.port} --queue-limit 200"))

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process, signal.SIGKILL)
            self._say(f"wait {self._process}")
            self._process = None

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.kill()
        self._starter.kill()
        self._starter.communicate()


class Client(threading.Thread):
    """Orders one job after the other. An order without an answer is sent again with its key, until it has one."""

    def __init__(self, port: int, seed: int, is_over: threading.Event, pause: float = 0.15) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self._port, self._random, self._is_over, self._pause = port, random.Random(seed), is_over, pause
        self._keys = (f"{seed}-{number}" for number in itertools.count())
        self.answered: dict[str, str] = {}
        """Ids by key."""
        self.removed: set[str] = set()
        """Those that were asked to be deleted."""
        self.statuses: collections.Counter[int] = collections.Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._order(next(self._keys))
                time.sleep(self._random.uniform(0, self._pause))
                self._do_something()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error

    def _order(self, key: str) -> None:
        prompt = "fail" if self._random.random() < 0.05 else f"order {key}"
        body = json.dumps({"prompt": prompt, "num_inference_steps": 2})
        while True:  # also when the test is over: the order may be in the ledger
            status, answer = self.call("POST", "/v1/videos", body, {"Idempotency-Key": key})
            if status == 200:
                self.answered[key] = answer["id"]
                return
            assert status in (0, 429), answer
            time.sleep(0.1)

    def _do_something(self) -> None:
        id_ = self._random.choice(list(self.answered.values()))
        chance = self._random.random()
        if chance < 0.1:
            self.call("POST", f"/v1/videos/{id_}/cancel")
        elif chance < 0.15:
            self.removed.add(id_)
            self.call("DELETE", f"/v1/videos/{id_}")
        elif chance < 0.6:
            self.call("GET", f"/v1/videos/{id_}")
        else:
            self.call("GET", "/v1/videos")

    def call(self, method: str, path: str, body: str | None = None, headers: Any = None) -> tuple[int, Any]:
        """The status, 0 where there was no answer, and the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            content, status = answer.read(), answer.status
        except (OSError, http.client.HTTPException):
            content, status = b"null", 0
        finally:
            connection.close()
        self.statuses[status] += 1
        assert status < 500, content
        return status, json.loads(content)


@contextlib.contextmanager
def clients_of(port: int, count: int, seed: int) -> Iterator[list[Client]]:
    is_over = threading.Event()
    clients = [Client(port, 1000 * seed + number, is_over) for number in range(count)]
    for client in clients:
        client.start()
    try:
        yield clients
    finally:
        is_over.set()
        for client in clients:
            client.join(60)
    for client in clients:
        assert client.failure is None, repr(client.failure)
        assert not client.is_alive()


def wait_until_over(directory: Path, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while states := {row[1] for row in read_ledger(directory)} - {"done", "failed", "cancelled"}:
        assert time.monotonic() < deadline, states
        time.sleep(0.2)
    time.sleep(1)  # of what is removed after its end


def read_ledger(directory: Path) -> list[Any]:
    path = directory / ".comfy-tpu" / "ledger.sqlite3"
    with contextlib.closing(sqlite3.connect(path, timeout=30)) as database:
        return database.execute("SELECT id, state, coalesce(error, ''), outputs, finished_at FROM jobs").fetchall()


def check_jobs(directory: Path, clients: list[Client]) -> collections.Counter[str]:
    """The number of jobs by state, after all checks."""
    answered = [id_ for client in clients for id_ in client.answered.values()]
    removed = {id_ for client in clients for id_ in client.removed}
    assert len(answered) == len(set(answered))  # a job for each key
    rows = read_ledger(directory)
    kept = {row[0] for row in rows}
    assert kept <= set(answered)  # none was made twice
    assert set(answered) - kept <= removed  # none is lost
    files = {path.name for path in directory.iterdir() if path.is_file()}
    for id_, state, error, outputs, finished_at in rows:
        assert state in ("done", "failed", "cancelled"), (id_, state)
        assert finished_at is not None, (id_, state)
        assert state == "done" or error, (id_, state)
        for output in json.loads(outputs or "[]") if state == "done" else ():
            path = directory / output["name"]
            if id_ not in removed or path.exists():  # a deletion may have been killed between file and ledger
                assert hashlib.sha256(path.read_bytes()).hexdigest() == output["sha256"]
            files.discard(output["name"])
    assert files == set()  # nobody's
    return collections.Counter(row[1] for row in rows)


def ends_by_job(log: Path) -> collections.Counter[str]:
    """How often the logs of all servers say that a job is done or has failed."""
    counted: collections.Counter[str] = collections.Counter()
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if entry.get("state") in ("done", "failed"):
                counted[entry["job"]] += 1
    return counted


def test_kills_of_the_server(tmp_path: Path) -> None:
    seed = int(os.environ.get("COMFY_TPU_TEST_SEED", secrets.randbelow(10**6)))
    print(f"COMFY_TPU_TEST_SEED={seed}")  # noqa: T201 - to do it again
    chosen, log = random.Random(seed), tmp_path / "log"
    servers = Servers(tmp_path / "served", log)
    try:
        servers.start()
        with clients_of(servers.port, 8, seed) as clients:
            for _ in range(KILLS):
                time.sleep(chosen.choice((chosen.uniform(0, 1), chosen.uniform(0, 4))))  # also while it starts
                servers.kill()
                servers.start()
        wait_until_over(tmp_path / "served")
        servers.kill()  # the last one, with nothing to do; then a start that cleans up
        servers.start()
        client = Client(servers.port, 0, threading.Event())
        deadline = time.monotonic() + 60
        while client.call("GET", "/healthz")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2)
        states = check_jobs(tmp_path / "served", clients)
    finally:
        servers.close()
    assert states["done"] > KILLS
    assert max(ends_by_job(log).values()) == 1
    statuses = sum((client.statuses for client in clients), collections.Counter[int]())
    print(states, statuses)  # noqa: T201
    locks = list((tmp_path / "served" / ".comfy-tpu").glob("*.lock"))
    assert len(locks) <= 2  # one of the last server


def test_kills_of_ray_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    seed = secrets.randbelow(10**6)
    chosen, directory, log = random.Random(seed), tmp_path / "served", tmp_path / "log"
    mark, port = f"COMFY_TPU_TEST_MARK={secrets.token_hex(8)}", _free_port()
    name, value = mark.split("=")
    environment = {each: given for each, given in os.environ.items() if each not in ("XLA_FLAGS", "RAY_ADDRESS")}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{ROOT / 'tests' / 'jobs'}", name: value}
    environment |= {"STAND_IN_SECONDS": "0.3", "JAX_PLATFORMS": "cpu"}
    words = ["serve", "demo", "-d", str(directory), "--port", str(port), "--workers", "2"]
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.stand_in_server", *words],
            cwd=ROOT,
            env=environment,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
    try:
        with clients_of(port, 2, seed) as clients:
            killed, deadline = 0, time.monotonic() + 240
            while killed < 6:
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                assert server.poll() is None, log.read_text()[-2000:]
                time.sleep(chosen.uniform(0.5, 3))
                found = find_processes(mark)
                actors = [each for each in found if command_line(each).startswith(b"ray::JobActor")]
                if actors and ends_by_job(log):
                    killed += kill(chosen.choice(actors))
        wait_until_over(directory)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        states = check_jobs(directory, clients)
    finally:
        for process in find_processes(mark):
            kill(process)
        server.wait()
    assert states["done"] > 6
    assert max(ends_by_job(log).values()) == 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
