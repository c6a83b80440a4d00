"""Whose TPU it is, read from file trees made for it: device files, processes, locks."""

import logging
import os

import jax
import pytest

from comfy_tpu.comfy.held_tpu import warn_of_held_tpu
from comfy_tpu.errors import MeshError
from comfy_tpu.parallel import mesh as mesh_module
from comfy_tpu.parallel.mesh import find_devices
from comfy_tpu.parallel.tpu_holders import TpuHolder, describe_use, find_holders, find_tpu

ME = os.getuid()
NO_USER = 4_000_000_000
IN_USE = "tpu: ABORTED: The TPU is already in use by process with pid 4711. Not attempting to load libtpu.so"


class Machine:
    """A root directory with what Linux shows of a machine."""

    def __init__(self, root):
        self.root = root
        for name in ("dev/vfio", "proc", "sys/bus/pci/devices", "tmp"):
            (root / name).mkdir(parents=True)

    def add_device(self, name):
        (self.root / "dev" / name).touch()

    def add_pci(self, address, vendor, kind):
        place = self.root / "sys/bus/pci/devices" / address
        place.mkdir()
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "class").write_text(f"{kind}\n")

    def add_process(self, pid, *opened, command=("python", "main.py", "--cpu"), uid=ME):
        place = self.root / "proc" / str(pid)
        (place / "fd").mkdir(parents=True)
        for number, target in enumerate(opened):
            (place / "fd" / str(number)).symlink_to(target)
        (place / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in command))
        (place / "status").write_text(f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        return place

    def add_lock(self, pid):
        file = self.root / "tmp/libtpu_lockfile"
        file.touch()
        lines = [f"1: FLOCK  ADVISORY  WRITE {pid} fd:01:{file.stat().st_ino} 0 EOF"]
        lines += ["1: -> FLOCK  ADVISORY  WRITE 99 fd:01:1 0 EOF", "2: POSIX  ADVISORY  WRITE 98 00:1a:2 0 EOF"]
        (self.root / "proc/locks").write_text("\n".join(lines) + "\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("device", "pci", "found"),
    [
        (None, None, None),
        ("accel0", None, "/dev/accel0"),
        ("accel", None, None),  # the directory of Linux's own class of accelerators
        ("vfio/vfio", None, None),
        ("vfio/0", None, "/dev/vfio/0"),
        ("vfio/0", ("0x1ae0", "0x120000"), "PCI 0000:00:05.0"),
        ("vfio/0", ("0x10de", "0x030000"), None),  # somebody's GPU, for a virtual machine
        (None, ("0x1ae0", "0x020000"), None),  # a network card of Google Cloud
    ],
)
def test_where_a_tpu_shows(machine, device, pci, found):
    if device:
        machine.add_device(device)
    if pci:
        machine.add_pci("0000:00:05.0", *pci)
    assert find_tpu(machine.root) == found


@pytest.mark.parametrize("opened", ["/dev/accel0", "/dev/vfio/3", "/tmp/libtpu_lockfile"])
def test_a_holder_has_its_command_and_user(machine, opened):
    machine.add_device("accel0")
    machine.add_process(17, "/dev/null", "/dev/accelerometer")
    machine.add_process(4711, "/dev/null", opened, command=("python", "my run.py"), uid=NO_USER)
    (holder,) = find_holders(machine.root)
    assert holder == TpuHolder(4711, "python 'my run.py'", str(NO_USER))
    assert str(holder) == f"process 4711 (python 'my run.py', user {NO_USER})"


def test_this_process_and_vfio_of_a_machine_without_a_tpu_are_none(machine):
    machine.add_process(os.getpid(), "/dev/accel0")
    machine.add_process(23, "/dev/vfio/3")
    assert find_holders(machine.root) == ()
    machine.add_device("accel0")
    assert [holder.pid for holder in find_holders(machine.root)] == [23]


def test_a_process_whose_files_may_not_be_listed_is_known_by_its_lock_and_by_the_message(machine, monkeypatch):
    machine.add_device("accel0")
    for pid in (4711, 4712, 4713):
        machine.add_process(pid, "/dev/accel0")
    listing = type(machine.root).iterdir

    def refuse(path):
        if path.name == "fd":
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(type(machine.root), "iterdir", refuse)
    assert find_holders(machine.root) == ()
    machine.add_lock(4712)
    assert [holder.pid for holder in find_holders(machine.root)] == [4712]
    assert [holder.pid for holder in find_holders(machine.root, IN_USE)] == [4711, 4712]


def test_a_process_that_is_gone_meanwhile(machine):
    machine.add_device("accel0")
    assert [str(holder) for holder in find_holders(machine.root, IN_USE)] == ["process 4711"]


def test_a_lock_file_without_a_process(machine):
    (machine.root / "tmp/libtpu_lockfile").touch()
    problem, advice = describe_use(machine.root, "Internal error when accessing /tmp/libtpu_lockfile")
    assert problem.startswith("it is held by another process, perhaps of user ")
    assert advice.endswith("or if there is none: sudo rm /tmp/libtpu_lockfile")
    assert describe_use(machine.root, "no libtpu") is None


@pytest.fixture
def only_cpu(monkeypatch):
    """JAX as it is where libtpu does not start, and nobody asked for a platform."""

    def devices(platform):
        if platform == "cpu":
            return ["a cpu"]
        raise RuntimeError(IN_USE.partition(": ")[2] if platform == "tpu" else "no gpu")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(mesh_module, "requested_platforms", list)


def test_the_cpu_of_a_tpu_machine_is_not_taken_and_the_holder_is_named(machine, only_cpu):
    machine.add_device("accel0")
    machine.add_process(4711, "/dev/accel0", uid=NO_USER)
    with pytest.raises(MeshError) as error:
        find_devices(root=machine.root)
    assert str(error.value) == (
        "this machine has a TPU (/dev/accel0), but it is held by process 4711 (python main.py --cpu, user 4000000000); "
        "end that first (kill 4711), or ask for the CPU: JAX_PLATFORMS=cpu, or --platform cpu of the command"
    )
    with pytest.raises(MeshError, match=r"^the TPU cannot be used: it is held by process 4711 .*\(kill 4711\)$"):
        find_devices("tpu", root=machine.root)


def test_a_tpu_that_does_not_start_for_another_reason(machine, only_cpu, monkeypatch):
    def devices(platform):
        if platform == "cpu":
            return ["a cpu"]
        raise RuntimeError("libtpu is not installed")

    monkeypatch.setattr(jax, "devices", devices)
    machine.add_device("accel0")
    message = (
        r"has a TPU \(/dev/accel0\), but jax could not start it \(tpu: libtpu is not installed.*`comfy-tpu doctor`"
    )
    with pytest.raises(MeshError, match=message):
        find_devices(root=machine.root)


def test_jax_that_starts_nothing_because_the_tpu_is_held(machine, monkeypatch):
    def devices(platform):
        raise RuntimeError(IN_USE)

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(MeshError, match=r"^the TPU cannot be used: it is held by process 4711; end that first"):
        find_devices(root=machine.root)


@pytest.mark.parametrize("requested", [["cpu"], ["cuda", "cpu"]])
def test_whoever_asks_for_the_cpu_gets_it(machine, only_cpu, monkeypatch, requested):
    machine.add_device("accel0")
    assert find_devices("cpu", root=machine.root) == ["a cpu"]
    monkeypatch.setattr(mesh_module, "requested_platforms", lambda: requested)
    assert find_devices(root=machine.root) == ["a cpu"]


def test_a_machine_without_a_tpu_falls_back_with_a_notice(machine, only_cpu, monkeypatch, caplog):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    mesh_module._log_cpu_fallback.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert find_devices(root=machine.root) == ["a cpu"]
    mesh_module._log_cpu_fallback.cache_clear()
    assert "no TPU or GPU was found" in caplog.text


@pytest.mark.parametrize(("requested", "lines"), [("", 1), ("tpu,cpu", 1), ("cpu", 0)])
def test_a_server_says_at_its_start_who_holds_the_tpu(machine, monkeypatch, caplog, requested, lines):
    monkeypatch.setenv("JAX_PLATFORMS", requested)
    machine.add_process(4711, "/dev/vfio/3", uid=NO_USER)
    warn_of_held_tpu(machine.root)  # this machine has no TPU
    machine.add_device("accel0")
    warn_of_held_tpu(machine.root)
    said = (
        f"the TPU (/dev/accel0) is held by process 4711 (python main.py --cpu, user {NO_USER}): the TPU nodes of this "
        "server cannot run before that ends (kill 4711)"
    )
    assert caplog.messages == [said] * lines


def test_this_machine_can_be_looked_at():
    """/proc of the tests' own machine: processes of others, and those that end meanwhile."""
    assert all(isinstance(holder, TpuHolder) for holder in find_holders())
    assert find_holders(message="in use by process with pid 1") != ()
