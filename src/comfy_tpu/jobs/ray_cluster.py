"""A Ray cluster: one that runs, or one of this machine's own, and the places in it for workers."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from comfy_tpu.distribution import install_command
from comfy_tpu.errors import ComfyTpuError, InvalidValueError

_CONNECT_SECONDS = 5.0
"""For a TCP connection to the cluster, before Ray tries: it would go on for a minute, and end the process."""
_OBJECT_STORE_BYTES = 512 * 2**20
"""Of a Ray of our own: videos on their way to the driver. More than that goes to the disk."""
_SOCKET_PATH_MAX = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Bytes of Ray's directory: the path of a Unix socket in it has 107 at most."""
_SCRATCH_PREFIX, _SCRATCH_LOCK = "comfy-tpu-ray-", "driver.lock"
_START_TRIES = 3
"""For a Ray of our own: it gives its processes 30 s, which a machine with much else to do may exceed."""
_END_SECONDS = 10.0
"""In which the processes of a Ray that was shut down end by themselves."""

POD_LABEL, SLICE_LABEL, WORKER_LABEL = "ray.io/tpu-pod-type", "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"


@dataclasses.dataclass(frozen=True)
class Place:
    """Room for one worker."""

    kind: Literal["cpu", "gpu", "tpu"]
    node_id: str
    chips: float = 0.0

    def options(self) -> dict[str, Any]:
        """How an actor is started there. CPUs and GPUs are chosen by Ray: others may have taken this one meanwhile."""
        if self.kind == "cpu":
            return {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if self.kind == "gpu":
            return {"num_cpus": 0, "num_gpus": 1}
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {
            "num_cpus": 0,
            "resources": {"TPU": self.chips},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node_id, soft=False),
        }


class Cluster:
    """A connection to a cluster, with `address`; without one, a cluster that lives as long as the connection."""

    def __init__(self, address: str | None, *, num_cpus: int | None = None) -> None:
        """`num_cpus`: of a cluster of its own. From the main thread: the processes end with the thread that made
        them."""
        self._address = address
        self._stack = contextlib.ExitStack()
        self.scratch: str | None = None
        """A directory for temporary files that is removed at the end, where all workers are on this machine."""
        self._processes: set[int] = set()
        """Actors on this machine."""
        ray = import_ray()
        self._ray = ray
        options: dict[str, Any] = {
            "namespace": f"comfy-tpu-{secrets.token_hex(4)}",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet_ray(ray))
            if address is None:
                self.scratch = stack.enter_context(_make_scratch())
                options |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
                options["object_store_memory"] = _OBJECT_STORE_BYTES
                # Ray's 15 is for the sake of its own processes: beside other programs, workers got 6 % of a core.
                options["_system_config"] = {"worker_niceness": 0}
                if len(os.fsencode(self.scratch)) <= _SOCKET_PATH_MAX:
                    options["_temp_dir"] = self.scratch
            else:
                options["address"] = _check_address(address)
            with _connection_errors(address), _kept_handler():
                stack.callback(self._shut_down)
                self._connect(options)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def _connect(self, options: dict[str, Any]) -> None:
        for attempt in range(1, _START_TRIES + 1):
            try:
                self._ray.init(**options)
                return
            except Exception as error:
                is_slow = "node registration may not be complete" in str(error)
                if self._address is not None or not is_slow or attempt == _START_TRIES:
                    raise
                self._ray.shutdown()

    def _shut_down(self) -> None:
        self._ray.shutdown()
        if self._address is None:
            _end_processes(self._processes)

    def add_process(self, host: str, process: int) -> None:
        """Notes an actor, so that it does not outlive a cluster of our own."""
        if host == socket.gethostname():
            self._processes.add(process)

    def nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def places(self, *, is_cpu_shared: bool) -> list[Place]:
        """Room for workers: of TPU hosts, if there are any, else of GPUs, else of CPUs; these one for each machine, or,
        if `is_cpu_shared`, for each core."""
        found = list(find_places(self.nodes(), is_cpu_shared=is_cpu_shared))
        kind = next((kind for kind in ("tpu", "gpu", "cpu") if any(place.kind == kind for place in found)), None)
        return [place for place in found if place.kind == kind]


@contextlib.contextmanager
def _make_scratch() -> Iterator[str]:
    """A directory for one Ray. Those of drivers that were killed are removed: the kernel has released their locks."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_SCRATCH_PREFIX}*/{_SCRATCH_LOCK}"):
        with contextlib.suppress(OSError):
            file = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(file)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, ignore_cleanup_errors=True) as directory:
        file = os.open(Path(directory, _SCRATCH_LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # where files cannot be locked, nothing is removed
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield directory
        finally:
            os.close(file)


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ComfyTpuError(f"ray is not installed; {install_command('ray')}") from error
    return ray


def find_places(nodes: Iterable[dict[str, Any]], *, is_cpu_shared: bool) -> Iterator[Place]:
    for node in nodes:
        resources, name = node["Resources"], node["NodeID"]
        chips = resources.get("TPU", 0.0)
        if chips and not is_part_of_slice(node):
            yield Place("tpu", name, chips)
        yield from [Place("gpu", name)] * int(resources.get("GPU", 0.0))
        cores = int(resources.get("CPU", 0.0))
        yield from [Place("cpu", name)] * (cores if is_cpu_shared else min(cores, 1))


def is_part_of_slice(node: dict[str, Any]) -> bool:
    """Whether a TPU host is one of several, which JAX starts together only."""
    from comfy_tpu.parallel.chips import parse_slice

    pod, chips = node.get("Labels", {}).get(POD_LABEL), node["Resources"].get("TPU", 0.0)
    if not pod:
        return False
    try:
        return parse_slice(pod).chips > chips
    except ComfyTpuError:  # a generation that we do not know
        return False


def find_slices(nodes: Iterable[dict[str, Any]]) -> set[str]:
    """Names of the slices, such as v6e-16, of whose hosts there are some."""
    return {node["Labels"][POD_LABEL] for node in nodes if is_part_of_slice(node)}


def describe(places: Collection[Place]) -> str:
    names = {"cpu": "CPU worker", "gpu": "GPU", "tpu": "TPU host"}
    kind = next((place.kind for place in places), "cpu")
    return f"{len(places)} {names[kind]}{'' if len(places) == 1 else 's'}"


def _check_address(address: str) -> str:
    """Raises InvalidValueError where nothing answers."""
    if address == "auto":
        return address
    match = re.fullmatch(r"(ray://)?(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if match is None or not 0 < int(match[3]) < 65_536:
        raise InvalidValueError(
            f"ray={address} is neither auto nor HOST:PORT; give the address that `ray start --head` printed",
            field="ray",
        )
    try:
        socket.create_connection((match[2].strip("[]"), int(match[3])), _CONNECT_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from error
    return address


def _no_cluster(address: str, reason: str) -> InvalidValueError:
    start = "start one with `ray start --head`" if address == "auto" else "give the address of its head"
    return InvalidValueError(f"ray={address}: no cluster answers there ({reason}); {start}", field="ray")


@contextlib.contextmanager
def _connection_errors(address: str | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray raises RuntimeError, ConnectionError, ValueError, AssertionError and its own
        text = " ".join(str(error).split()) or type(error).__name__
        if "ersion mismatch" in text:
            raise ComfyTpuError(
                f"ray={address}: the cluster has other versions than this machine ({_versions(text)}); install the "
                "same Ray and Python on all machines",
                field="ray",
            ) from error
        if "token" in text and "uthentication" in text:
            raise ComfyTpuError(
                f"ray={address}: the cluster asks for a token that this machine does not have; copy ~/.ray/auth_token "
                "of its head",
                field="ray",
            ) from error
        if address is not None:
            raise _no_cluster(address, text[:200]) from error
        raise ComfyTpuError(f"ray could not be started on this machine ({text[:300]})") from error


def _versions(text: str) -> str:
    found = re.findall(r"(Ray|Python):\s*([\w.+-]+)", text)
    return ", ".join(f"{name} {version}" for name, version in found) or text[:200]


@contextlib.contextmanager
def _quiet_ray(ray: Any) -> Iterator[None]:
    """Keeps what Ray changes in this process, and prints there, to the time of the connection."""
    logger = logging.getLogger("ray")
    level, mode = logger.level, os.environ.get("RAY_AUTH_MODE")
    worker = sys.modules.get("ray._private.worker")
    printing = getattr(worker, "print_to_stdstream", None)
    logger.setLevel(logging.ERROR)
    if printing is not None:
        # It tells of every worker that died, on standard output, where --json has its lines.
        worker.print_to_stdstream = lambda *arguments, **options: None  # type: ignore[union-attr]
    try:
        yield
    finally:
        logger.setLevel(level)
        if printing is not None:
            worker.print_to_stdstream = printing  # type: ignore[union-attr]
        if mode is None:
            os.environ.pop("RAY_AUTH_MODE", None)


@contextlib.contextmanager
def _kept_handler() -> Iterator[None]:
    """Undoes that Ray has SIGTERM end this process: whoever runs it has its own handler."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _end_processes(processes: Iterable[int]) -> None:
    """Waits for actors whose Ray is gone, and kills those that do not notice: XLA may be compiling."""
    end = time.monotonic() + _END_SECONDS
    left = set(processes)
    while left := {process for process in left if _is_actor(process)}:
        if time.monotonic() > end:
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            return
        time.sleep(0.05)


def _is_actor(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False
