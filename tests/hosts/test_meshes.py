"""Meshes over fake devices of several hosts and slices."""

import dataclasses
import logging

import numpy as np
import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import MeshError
from comfy_tpu.parallel.host_meshes import arrange_over_networks, check_hosts, crossing_axes, group_by_network


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    slice_index: int = 0


def cpu_hosts(hosts, each):
    return [Device(number, number // each) for number in range(hosts * each)]


def tpu_hosts(hosts, each, slices=1):
    return [Device(number, number // each, "tpu", number * slices // (hosts * each)) for number in range(hosts * each)]


def arrange(sizes, devices):
    made = np.empty(len(devices), dtype=object)
    made[:] = devices
    return made.reshape(sizes.dp, sizes.sp, sizes.tp)


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh).tolist()


def test_groups():
    assert [len(group) for group in group_by_network(cpu_hosts(4, 2))] == [2, 2, 2, 2]
    # The links of a slice go from host to host.
    assert [len(group) for group in group_by_network(tpu_hosts(4, 4))] == [16]
    assert [len(group) for group in group_by_network(tpu_hosts(4, 4, slices=2))] == [8, 8]


@pytest.mark.parametrize("devices", [cpu_hosts(2, 4), tpu_hosts(4, 2, slices=2)], ids=["hosts", "slices"])
def test_dp_goes_over_the_slower_network(devices, caplog):
    shuffled = devices[::2] + devices[1::2]
    mesh = arrange_over_networks(MeshSizes(dp=2, sp=2, tp=2), shuffled, arrange)
    assert sorted(np.array(ids(mesh[0])).flat) == [0, 1, 2, 3]
    assert crossing_axes(mesh) == ()
    assert not caplog.records


def test_a_slice_of_several_hosts_is_one_network(caplog):
    devices = tpu_hosts(4, 2)
    mesh = arrange_over_networks(MeshSizes(sp=8), devices, arrange)
    assert ids(mesh) == [[[number] for number in range(8)]]
    assert not caplog.records


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        (MeshSizes(dp=2, sp=4), "sp"),
        (MeshSizes(dp=2, tp=4), "tp"),
        (MeshSizes(sp=8), "sp"),
        (MeshSizes(sp=2, tp=4), "sp and tp"),
    ],
)
def test_axes_that_cross_hosts_are_named(sizes, axes, caplog):
    with caplog.at_level(logging.WARNING):
        mesh = arrange_over_networks(sizes, cpu_hosts(4, 2), arrange)
    assert list(np.array(ids(mesh)).flat) == list(range(8))  # as in one process: the same program
    (record,) = caplog.records
    assert record.getMessage() == (
        f"mesh {sizes}: {axes} crosses the network between 4 hosts, which is slower than the links inside one; a mesh "
        "with sp×tp of at most 2 keeps to them"
    )


def test_every_host_has_a_part():
    check_hosts(MeshSizes(dp=2, sp=4), cpu_hosts(4, 2))
    check_hosts(MeshSizes(sp=4), cpu_hosts(1, 8))
    with pytest.raises(MeshError, match="mesh dp=1,sp=4,tp=1 has 4 devices, but 4 hosts have 8, .* product is 8, or"):
        check_hosts(MeshSizes(sp=4), cpu_hosts(4, 2))
