"""Several hosts as one run: each host runs the same command, and the first one decides, reads and writes.

Without `start_hosts` there is one process, which is the first, and every function here returns at once.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib.metadata
import logging
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.config import HostsConfig
from comfy_tpu.errors import ComfyTpuError, HostsError
from comfy_tpu.parallel.coordination import LINGER_SECONDS, delay_abort, separate_service
from comfy_tpu.parallel.host_link import ROOT_CAUSE_SECONDS, HostLink, Json, accept_all, connect, listen

logger = logging.getLogger(__name__)

PROCESSES_MAX = 4096
_VERSIONS = ("comfy-tpu", "jax", "jaxlib", "libtpu", "torch", "torchax")
"""Distributions that must be the same on all hosts: each compiles the same program for itself."""
_CHUNK = 4 * 2**20
AGREE_SECONDS = 300.0
"""The time in which all others must come to know of an error that need not end the run. They may still compile what the
failed process had in its cache; one that waits for it in a collective never comes."""
# A process that waits for the others at its end, after all have said that they are done.
_SHUTDOWN_SECONDS = 20


@dataclasses.dataclass(frozen=True)
class Address:
    """Where the processes of a run meet, and which of them this is."""

    host: str
    port: int
    num_processes: int
    process_id: int


_link: HostLink | None = None
"""The other processes of this run; None: there are none."""
_address: Address | None = None


@contextlib.contextmanager
def start_hosts(
    config: HostsConfig,
    *,
    report: Callable[[str], None],
    cleanups: tuple[Callable[[], object], ...] = (),
    watches_signals: bool = True,
) -> Iterator[None]:
    """Joins the other processes for the length of the block; they end where one of them fails.

    `report` prints the sentence with which another process ends this one, after `cleanups` have removed its files. A
    process whose block raises must end by `os._exit`: at its exit JAX would wait for the others. `watches_signals`:
    only in the main thread, which alone can.
    """
    global _link, _address
    assert _link is None, "the processes have joined already"
    _address = find_address(config)
    _link = link = join(_address, config.hosts_timeout)
    link.on_end(report, *cleanups)
    try:
        with link.watching_signals() if watches_signals else contextlib.nullcontext():
            yield
            link.finish()
            stop_devices()
    except BaseException as error:
        link.fail(_sentence(error), wait=0.0 if _is_own(error) else ROOT_CAUSE_SECONDS)
        raise
    finally:
        _link = _address = None


def _is_own(error: BaseException) -> bool:
    """Whether an error has its cause in this process. The end of another one shows as an error of a collective."""
    return isinstance(error, ComfyTpuError | KeyboardInterrupt | SystemExit)


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if isinstance(error, SystemExit):
        return "it was terminated" if isinstance(error.code, int) and error.code > 128 else "its command was refused"
    return str(error) if isinstance(error, ComfyTpuError) else f"{type(error).__name__}: {error}"


def find_address(config: HostsConfig) -> Address:
    """The address of the first process, and the numbers; raises HostsError where they cannot work."""
    text, count, number = config.coordinator, config.num_processes, config.process_id
    for field in ("num_processes", "process_id"):
        value = getattr(config, field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise HostsError(f"{field}={value} is not a whole number; count processes from 0", field=field)
    seconds: Any = config.hosts_timeout  # a command gives text that is no number as it is
    if not isinstance(seconds, int | float) or not 1 <= seconds <= 86_400:
        raise HostsError(
            f"hosts_timeout={config.hosts_timeout} is not a time; give 1 to 86400 seconds", field="hosts_timeout"
        )
    if text == "auto":
        text, count, number = _detect(count, number, config.hosts_timeout)
    for field, value in (("coordinator", text), ("num_processes", count), ("process_id", number)):
        if value is None:
            raise HostsError(
                f"{field} is missing; give --coordinator, --num-processes and --process-id, or --coordinator auto on a "
                "TPU slice, GKE or Slurm",
                field=field,
            )
    assert text is not None
    assert count is not None
    assert number is not None
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text)
    if match is None or not 1 <= int(match[3]) < 65_535:
        raise HostsError(
            f"coordinator={text} is not HOST:PORT; give an address of process 0 that all hosts reach, such as "
            "10.0.0.2:8476",
            field="coordinator",
        )
    if not 1 <= count <= PROCESSES_MAX:
        raise HostsError(
            f"num_processes={count} is not the number of processes; give 1 to {PROCESSES_MAX}, one for each host",
            field="num_processes",
        )
    if not 0 <= number < count:
        raise HostsError(
            f"process_id={number} is not in 0 to {count - 1}, the numbers of {count} processes; give each host its own",
            field="process_id",
        )
    return Address(match[1] or match[2], int(match[3]), count, number)


def _detect(count: int | None, number: int | None, seconds: float) -> tuple[str | None, int | None, int | None]:
    """What JAX knows of the cluster that this process was started in."""
    try:
        from jax._src import clusters  # jax.distributed.initialize asks it too, and does not tell

        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, count, number, None, None, max(1, int(seconds))
        )
    except Exception as error:
        raise HostsError(
            f"coordinator=auto: the cluster does not say who its hosts are ({type(error).__name__}: {error}); give "
            "--coordinator HOST:PORT, --num-processes and --process-id",
            field="coordinator",
        ) from error
    if found[0] is None:
        raise HostsError(
            "coordinator=auto finds no TPU slice, GKE, Slurm or Open MPI here; give --coordinator HOST:PORT, "
            "--num-processes and --process-id",
            field="coordinator",
        )
    return found[0], found[1], found[2]


def join(address: Address, seconds: float) -> HostLink:
    """Waits for all processes; raises HostsError where they do not come, or are of other versions."""
    hello = {
        "type": "hello",
        "process": address.process_id,
        "processes": address.num_processes,
        "host": socket.gethostname(),
        "versions": {name: _version(name) for name in _VERSIONS},
    }
    place = (address.host, address.port + 1)
    if address.process_id:
        return connect(place, address.process_id, address.num_processes, hello, seconds)
    return accept_all(_open_ports(address), address.num_processes, hello, seconds, _refusal)


def _open_ports(address: Address) -> socket.socket:
    """The socket on which the first host listens. The last run's service may hold its port for some seconds."""
    deadline = time.monotonic() + LINGER_SECONDS + 2
    while True:
        try:
            listen((address.host, address.port)).close()  # JAX's
            return listen((address.host, address.port + 1))
        except OSError as error:
            if time.monotonic() > deadline or isinstance(error, socket.gaierror):
                raise HostsError(
                    f"coordinator={address.host}:{address.port} cannot be opened on process 0 "
                    f"({error.strerror or error}); give an address of this machine whose ports {address.port} and "
                    f"{address.port + 1} are free",
                    field="coordinator",
                ) from error
        time.sleep(0.5)


def _refusal(own: Mapping[str, Json], other: Mapping[str, Json]) -> str | None:
    number, count = other["process"], own["processes"]
    if other.get("processes") != count:
        return (
            f"num_processes={count} on process 0, but {other.get('processes')} on process {number}; give all hosts the "
            "same number"
        )
    if not 0 <= number < count:
        return f"process_id={number} is not in 0 to {count - 1}, the numbers of {count} processes"
    theirs = other.get("versions")
    for name, version in own["versions"].items():
        found = theirs.get(name) if isinstance(theirs, dict) else None
        if found != version:
            return (
                f"{name} is {version or 'not installed'} on process 0, but {found or 'not installed'} on process "
                f"{number}; install the same versions on all hosts"
            )
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def start_devices(config: HostsConfig) -> None:
    """Starts JAX over all processes that have joined. Before any device is used."""
    if _link is None or _address is None:
        return
    import jax

    address = _address
    host = f"[{address.host}]" if ":" in address.host else address.host
    # It would take SIGTERM away from this process, and do nothing.
    jax.config.update("jax_enable_preemption_service", False)
    delay_abort()
    with separate_service():
        try:
            jax.distributed.initialize(
                f"{host}:{address.port}",
                address.num_processes,
                address.process_id,
                initialization_timeout=max(1, int(config.hosts_timeout)),
                shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise HostsError(f"jax could not connect the {address.num_processes} processes ({error})") from error


def stop_devices() -> None:
    """Ends JAX's connections, after all processes are done."""
    if "jax" not in sys.modules:  # as in the doctor's process
        return
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def is_first_host() -> bool:
    """Whether this process reads and writes for all; true where it is alone."""
    return _link is None or _link.is_first


def host_names() -> dict[int, str]:
    """Machines by process; empty where this process is alone."""
    return {} if _link is None else dict(sorted(_link.names.items()))


def first_host_value(compute: Callable[[], Json]) -> Json:
    """What `compute` returns on the first host, in every process."""
    if _link is None:
        return compute()
    return _link.broadcast(compute() if _link.is_first else None)


def gather(value: Json) -> dict[int, Json]:
    """The values of all processes by number on the first host; on another, only its own."""
    return {0: value} if _link is None else _link.gather(value)


def check_same(**facts: str) -> None:
    """Raises HostsError, in all processes, where a fact is not the same on all hosts."""
    if _link is None:
        return
    found = gather(facts)
    if _link.is_first:
        for number, theirs in found.items():
            for name, value in facts.items():
                other = theirs.get(name) if isinstance(theirs, dict) else None
                if other != value:
                    raise HostsError(
                        f"{name} is {value} on process 0, but {other} on process {number}; start all hosts with the "
                        "same model and options",
                        field=name,
                    )
    _link.broadcast()  # nobody goes on before all are compared


@contextlib.contextmanager
def failing_together(*own: type[Exception]) -> Iterator[dict[str, str]]:
    """Raises in all processes where the block raises in one of them, or its facts differ: none waits for another.

    The block may fill the yielded dict with facts that must be the same everywhere. A process raises its own error, or
    HostsError with that of another. `own`: errors that are not told, because the run ends by them.
    """
    facts: dict[str, str] = {}
    error: Exception | None = None
    try:
        yield facts
    except own:
        raise
    except Exception as caught:  # noqa: BLE001 - raised again below
        error = caught
    if _link is not None:
        sentence = None if error is None else _sentence(error)
        failure = _link.agree(sentence, {"error": sentence, "facts": facts}, _find_failure, AGREE_SECONDS)
        if failure is not None and error is None:
            error = HostsError(failure)
    if error is not None:
        raise error


def _find_failure(told: Mapping[int, Json]) -> str | None:
    assert _link is not None
    for number, each in told.items():
        if each["error"] is not None:
            return f"{_link.describe(number)} failed: {each['error']}"
    for number, each in told.items():
        for name, value in told[0]["facts"].items():
            if each["facts"].get(name) != value:
                return (
                    f"{name} is {value} on process 0, but {each['facts'].get(name)} on process {number}; start all "
                    "hosts with the same model and options"
                )
    return None


def cleaning_up(cleanup: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """Has `cleanup` called where another process ends this one inside the block."""
    return contextlib.nullcontext() if _link is None else _link.cleaning_up(cleanup)


@contextlib.contextmanager
def shared_files(paths: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """Copies of the first host's files by key, in a temporary directory of every other host; there, as they are."""
    if _link is None or _link.is_first:
        copy_files(paths, Path())
        yield dict(paths)
        return
    with tempfile.TemporaryDirectory(prefix="comfy-tpu-") as directory:
        yield copy_files({}, Path(directory))


def copy_files(paths: Mapping[str, Path], directory: Path) -> dict[str, Path]:
    """Copies of the first host's `paths` by key, in an empty `directory` of every other host; there, as they are.

    Raises HostsError on the first host where one cannot be read; the others then have fewer.
    """
    if _link is None:
        return dict(paths)
    if _link.is_first:
        try:
            for key, path in paths.items():
                _send_file(key, path)
        finally:
            _link.broadcast(None)
        return dict(paths)
    received: dict[str, Path] = {}
    while (part := _link.broadcast()) is not None:
        # Each in a directory of its own, because models and formats are told by names.
        place = directory / str(len(received) if part["key"] not in received else len(received) - 1)
        place.mkdir(exist_ok=True)
        received[part["key"]] = file = place / Path(part["name"]).name
        with file.open("ab") as opened:
            opened.write(base64.b64decode(part["data"]))
    return received


def _send_file(key: str, path: Path) -> None:
    assert _link is not None
    try:
        with path.open("rb") as opened:
            is_first = True
            while (data := opened.read(_CHUNK)) or is_first:
                is_first = False
                _link.broadcast({"key": key, "name": path.name, "data": base64.b64encode(data).decode("ascii")})
    except OSError as error:
        raise HostsError(f"{path} cannot be read ({error.strerror or error}); give another path") from error
