"""Processes that join, exchange, fail and die, without devices."""

import contextlib
import select
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from comfy_tpu.config import HostsConfig
from comfy_tpu.errors import HostsError
from comfy_tpu.parallel import host_link, hosts
from tests.hosts.processes import find_port, start, wait_all

SCRIPT = Path(__file__).with_name("link_script.py")


def run(action, tmp_path, numbers=(0, 1, 2), count=3, seconds=600, port=None):
    port = port or find_port()
    return [start(SCRIPT, action, str(n), str(count), str(port), str(seconds), cwd=tmp_path) for n in numbers]


def test_exchange(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 40_000)
    results = wait_all(run("exchange", tmp_path))
    for number, (status, out, err) in enumerate(results):
        assert (status, err) == (0, ""), err
        joined, value, gathered, files, distinct, done = out.splitlines()
        assert joined == f"joined [0, 1, 2] {number == 0}"
        assert value == "{'prompt': 'a \\udcff b', 'from': 0}"
        assert gathered == ("{0: 0, 1: 10, 2: 20}" if number == 0 else f"{{{number}: {number * 10}}}")
        total = sum(range(256)) * 40_000
        assert files == str({"image 0": ("a.bin", total), "lora 1": ("a.bin", total)})
        assert distinct == ("1" if number == 0 else "2")
        assert done == "done True False"


def test_all_fail_together_and_go_on(tmp_path):
    results = wait_all(run("together", tmp_path))
    for number, (status, out, err) in enumerate(results):
        assert (status, err) == (0, ""), err
        _, well, one, every, facts, again, _ = out.splitlines()
        assert well == again == "well"
        failed = "one fails on 1"
        assert one == failed if number == 1 else (one.startswith("process 1 of 3 (") and one.endswith(failed))
        assert every == f"all fail on {number}"
        assert facts.startswith("model is a on process 0, but b on process 2; start all hosts with the same model")


@pytest.mark.thorough  # by default: an error that they hear
def test_an_error_that_the_others_do_not_come_to_hear_ends_all(tmp_path):
    results = wait_all(run("alone", tmp_path))
    assert [status for status, _, _ in results] == [1, 1, 1]
    for line in sentences(results):
        assert "process 1 of 3 (" in line
        assert line.endswith("failed, and the others do not answer: the others wait in a collective")


def sentences(results):
    """The one line of each process that was not killed."""
    for status, _, err in results:
        assert status == -9 or len(err.splitlines()) == 1, err
    return [err.strip() for _, _, err in results]


@pytest.mark.parametrize(
    ("action", "culprit", "sentence"),
    [
        ("fail", 1, "failed, so this one ends too: height=100 is odd; choose another"),
        ("kill", 2, "has ended or cannot be reached, so this one ends too; look at its output, and start all again"),
    ],
)
def test_end_of_one_ends_all(action, culprit, sentence, tmp_path):
    results = wait_all(run(action, tmp_path))
    for number, line in enumerate(sentences(results)):
        if number != culprit:
            assert line.startswith(f"process {culprit} of 3 (")
            assert line.endswith(sentence)
            assert results[number][0] == 1
            assert (tmp_path / f"cleanup-{number}").exists()


def test_an_error_of_code_is_told(tmp_path):
    results = wait_all(run("bug", tmp_path))
    assert "failed, so this one ends too: RuntimeError: a bug" in results[0][2]
    assert "RuntimeError: a bug" in results[2][2]
    assert all(status == 1 for status, _, _ in results)


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("number", [0, 2])
def test_signal_ends_all(number, tmp_path):
    processes = run("victim", tmp_path)
    for process in processes:
        assert process.stdout.readline().startswith("joined")
    processes[number].terminate()  # Python's default action: as kill -9, without cleanups
    results = wait_all(processes)
    others = [result for n, result in enumerate(results) if n != number]
    assert all(status == 1 and f"process {number} of 3" in err for status, _, err in others)


def test_different_options(tmp_path):
    results = wait_all(run("differ", tmp_path))
    own, *others = sentences(results)
    assert own == (
        "mesh is dp=2,sp=4 on process 0, but sp=8 on process 2; start all hosts with the same model and options"
    )
    assert all(line.endswith(own) for line in others)


def hello(process):
    return {"type": "hello", "process": process, "host": f"machine {process}"}


@contextlib.contextmanager
def joining(server, process, errors):
    """A process that waits at the first host's door, before that one listens; `errors`: what it raises."""

    def join():
        try:
            host_link.connect(server.getsockname(), process, 4, hello(process), 600)
        except HostsError as error:
            errors.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    select.select([server], [], [])
    yield
    thread.join()


def accept(server, seconds):
    """Why the first host of four gives up."""
    with pytest.raises(HostsError) as raised:
        host_link.accept_all(server, 4, hello(0), seconds, lambda own, other: None)
    return str(raised.value)


def test_a_host_that_never_joins_is_named():
    errors = []
    with host_link.listen(("localhost", 0)) as server, joining(server, 2, errors):
        own = accept(server, seconds=0.5)
    assert own == (
        "hosts_timeout=0.5 seconds have passed, and processes 1, 3 of 4 have not joined; start the same command there "
        "with its own --process-id, or look at its error"
    )
    assert errors == [f"process 0 refused to start: {own}"]


def test_a_host_that_ends_before_all_have_joined():
    with host_link.listen(("localhost", 0)) as server:
        with contextlib.closing(host_link.Peer(socket.create_connection(server.getsockname()))) as other:
            other.send(hello(1))
        assert accept(server, seconds=600) == (
            "process 1 of 4 (machine 1) ended before all had joined; look at its output, and start all again"
        )


@pytest.mark.thorough  # by default: hosts that join together
def test_a_host_that_joins_late(tmp_path):
    port = find_port()
    late = run("exchange", tmp_path, numbers=(1, 2), port=port)
    (tmp_path / "a.bin").touch()
    time.sleep(2)
    results = wait_all([*run("exchange", tmp_path, numbers=(0,), port=port), *late])
    assert [status for status, _, _ in results] == [0, 0, 0], results


def test_unreachable_coordinator(tmp_path):
    port = find_port()
    ((status, _, err),) = wait_all(run("exchange", tmp_path, numbers=(1,), seconds=1, port=port))
    assert status == 1
    assert err.strip() == (
        f"coordinator=localhost:{port} could not be reached from process 1 in 1 seconds (Connection refused); start "
        f"process 0 there, and let ports {port} and {port + 1} through"
    )


def test_one_number_for_two_processes(tmp_path):
    results = wait_all(run("exchange", tmp_path, numbers=(0, 1, 1)))
    for line in sentences(results):
        assert "process_id=1 was given to two processes, on " in line


@pytest.mark.slow  # six seconds of waiting
def test_port_that_is_taken(tmp_path):
    port = find_port()
    with host_link.listen(("localhost", port + 1)):
        ((status, _, err),) = wait_all(run("exchange", tmp_path, numbers=(0,), port=port))
    assert status == 1
    assert err.startswith(f"coordinator=localhost:{port} cannot be opened on process 0 (Address already in use")
    assert len(err.splitlines()) == 1


def test_stray_connections_are_ignored(tmp_path):
    (tmp_path / "a.bin").touch()
    port = find_port()
    first = run("exchange", tmp_path, numbers=(0,), port=port)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"type": "hello", "process": "1"}\n', b"\xff\n"):
        for _ in range(100):
            try:
                stray = socket.create_connection(("localhost", port + 1))
                break
            except OSError:
                time.sleep(0.1)
        with stray:
            stray.sendall(text)
            stray.shutdown(socket.SHUT_WR)
            assert stray.recv(10) == b""
    results = wait_all([*first, *run("exchange", tmp_path, numbers=(1, 2), port=port)])
    assert [status for status, _, _ in results] == [0, 0, 0]


ABORT = """
import ctypes, os, sys, threading, time
from comfy_tpu.parallel.coordination import delay_abort
delay_abort()
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
time.sleep(1)
sys.stderr.write("a sentence")
sys.stderr.flush()
os._exit(1) if len(sys.argv) == 1 else time.sleep(60)
"""


@pytest.mark.parametrize(("arguments", "status"), [((), 1), pytest.param(("stay",), -6, marks=pytest.mark.slow)])
def test_a_sentence_before_an_abort(arguments, status, tmp_path):
    """By os._exit in time, else after six seconds by the abort."""
    assert wait_all([start("-c", ABORT, *arguments, cwd=tmp_path)]) == [(status, "", "a sentence")]


def test_a_handler_of_abort_that_is_there_stays(tmp_path):
    code = "import os; from comfy_tpu.parallel.coordination import delay_abort; delay_abort(); os.abort()"
    ((status, _, err),) = wait_all([start("-X", "faulthandler", "-c", code, cwd=tmp_path)])
    assert status == -6
    assert err.startswith("Fatal Python error: Aborted")


OWN = {"type": "hello", "process": 0, "processes": 3, "host": "a", "versions": {"jax": "0.10.2", "torch": "2.13"}}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({}, None),
        ({"processes": 4}, "num_processes=3 on process 0, but 4 on process 1; give all hosts the same number"),
        ({"process": 3}, "process_id=3 is not in 0 to 2, the numbers of 3 processes"),
        (
            {"versions": {"jax": "0.11.0", "torch": "2.13"}},
            "jax is 0.10.2 on process 0, but 0.11.0 on process 1; install the same versions on all hosts",
        ),
        (
            {"versions": {"jax": "0.10.2"}},
            "torch is 2.13 on process 0, but not installed on process 1; install the same versions on all hosts",
        ),
        (
            {"versions": 5},
            "jax is 0.10.2 on process 0, but not installed on process 1; install the same versions on all hosts",
        ),
    ],
)
def test_refusals(other, sentence):
    assert hosts._refusal(OWN, {**OWN, "process": 1, **other}) == sentence


@pytest.mark.parametrize(
    ("config", "field", "text"),
    [
        (("h:1", 4, 4), "process_id", "process_id=4 is not in 0 to 3, the numbers of 4 processes; give each host its"),
        (("h:1", 4, -1), "process_id", "process_id=-1 is not in 0 to 3"),
        (("h:1", 0, 0), "num_processes", "num_processes=0 is not the number of processes; give 1 to 4096"),
        (("h:1", "x", 0), "num_processes", "num_processes=x is not a whole number"),
        (("h:1", 4, None), "process_id", "process_id is missing; give --coordinator, --num-processes and --process-id"),
        ((None, 4, 1), "coordinator", "coordinator is missing"),
        (("h", 4, 1), "coordinator", "coordinator=h is not HOST:PORT; give an address of process 0"),
        (("h:65535", 4, 1), "coordinator", "coordinator=h:65535 is not HOST:PORT"),
        (("http://h:80", 4, 1), "coordinator", "coordinator=http://h:80 is not HOST:PORT"),
        (("auto", 4, 1), "coordinator", "coordinator=auto finds no TPU slice, GKE, Slurm or Open MPI here"),
        (("h:1", 4, 1, 0.0), "hosts_timeout", "hosts_timeout=0.0 is not a time; give 1 to 86400 seconds"),
        (("h:1", 4, 1, "soon"), "hosts_timeout", "hosts_timeout=soon is not a time"),
    ],
)
def test_bad_addresses(config, field, text):
    with pytest.raises(HostsError) as raised:
        hosts.find_address(HostsConfig(*config))
    assert str(raised.value).startswith(text)
    assert raised.value.field == field


def test_clusters_that_jax_has_under_another_name(monkeypatch):
    monkeypatch.delattr("jax._src.clusters")
    monkeypatch.setitem(sys.modules, "jax._src.clusters", None)
    with pytest.raises(HostsError, match="coordinator=auto: .*give --coordinator HOST:PORT"):
        hosts.find_address(HostsConfig("auto"))


def test_addresses():
    assert hosts.find_address(HostsConfig("[::1]:8476", 2, 1)) == hosts.Address("::1", 8476, 2, 1)
    assert hosts.find_address(HostsConfig("tpu-0.svc:8476", 2, 0)).host == "tpu-0.svc"


def test_slurm_is_found(monkeypatch):
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_STEP_NODELIST", "node[3-4]"), ("SLURM_NTASKS", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    found = hosts.find_address(HostsConfig("auto"))
    assert (found.host, found.num_processes, found.process_id) == ("node3", 2, 1)


def test_one_process_alone():
    assert hosts.is_first_host()
    assert hosts.host_names() == {}
    assert hosts.first_host_value(lambda: 5) == 5
    assert hosts.gather(5) == {0: 5}
    hosts.check_same(mesh="dp=2")
    with hosts.shared_files({"image 0": Path("x")}) as files:
        assert files == {"image 0": Path("x")}
