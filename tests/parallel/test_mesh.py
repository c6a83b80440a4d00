import itertools
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import MeshError
from comfy_tpu.parallel import mesh as mesh_module
from comfy_tpu.parallel.mesh import (
    abstract_placement,
    arrange_devices,
    chip_name,
    find_devices,
    make_placement,
    parse_mesh,
)


@pytest.fixture
def fresh_notice():
    mesh_module._log_cpu_fallback.cache_clear()
    yield
    mesh_module._log_cpu_fallback.cache_clear()


def test_auto_falls_back_to_cpu_with_one_notice(fresh_notice, caplog, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    with caplog.at_level(logging.WARNING):
        assert find_devices() == find_devices() == jax.devices("cpu")
    notices = [record.getMessage() for record in caplog.records]
    assert len(notices) == 1
    assert notices[0].startswith("no TPU or GPU was found: running on 8 CPU device(s)")
    assert notices[0].endswith("`comfy-tpu doctor` says why")


def test_asking_for_cpu_is_not_a_fallback(fresh_notice, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING):
        assert len(find_devices("cpu")) == 8
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        assert len(find_devices()) == 8
    assert not caplog.records


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_missing_platform_is_an_error_and_leaves_jax_usable(platform):
    with pytest.raises(MeshError, match=rf"platform '{platform}' was asked for but jax could not start it \(.*'auto'"):
        find_devices(platform)
    assert len(jax.devices()) == 8


def test_unknown_platform():
    with pytest.raises(MeshError, match="platform='rocm2' is unknown; choose from auto, tpu, gpu, cpu"):
        find_devices("rocm2")


def test_first_platform_wins(monkeypatch, fresh_notice):
    def devices(platform):
        if platform == "tpu":
            raise RuntimeError("no libtpu")
        return [platform]

    monkeypatch.setattr(jax, "devices", devices)
    assert find_devices() == ["gpu"]


def test_no_platform_at_all(monkeypatch):
    def devices(platform):
        raise RuntimeError(f"{platform} is broken")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(MeshError, match=r"could start none of tpu, gpu, cpu \(tpu: tpu is broken.*JAX_PLATFORMS"):
        find_devices()


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("TPU v6 lite", "v6e"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU7x", "v7x"),
        ("TPU v7x", "v7x"),
        ("NVIDIA H200", "h200"),
        ("cpu", "cpu"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA A100-SXM4-80GB", "nvidia a100-sxm4-80gb"),
        ("TPU v55", "tpu v55"),
    ],
)
def test_chip_name(kind, chip):
    assert chip_name(SimpleNamespace(device_kind=kind)) == chip


@pytest.mark.parametrize(
    ("text", "count", "sizes"),
    [
        ("auto", 1, MeshSizes()),
        ("auto", 2, MeshSizes(dp=2)),
        ("auto", 8, MeshSizes(dp=2, sp=4)),
        ("auto", 7, MeshSizes(sp=7)),
        ("1", 8, MeshSizes()),
        ("single", 8, MeshSizes()),
        ("seed", 8, MeshSizes(dp=2, tp=4)),
        ("dp=2,tp=4", 8, MeshSizes(dp=2, tp=4)),
        (" sp = 4 , dp=2", 8, MeshSizes(dp=2, sp=4)),
        ("sp=8", 8, MeshSizes(sp=8)),
        (MeshSizes(tp=3), 8, MeshSizes(tp=3)),
    ],
)
def test_parse_mesh(text, count, sizes):
    assert parse_mesh(text, count) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,tp=8", r"mesh dp=2,sp=1,tp=8 needs 16 devices but there are 8; choose sizes whose product is at most 8"),
        (
            "seed,dp=2",
            r"'seed' is not of the form axis=size; write axes such as 'dp=2,sp=4', or one of auto, 1, single",
        ),
        ("8", r"'8' is not of the form axis=size"),
        ("", r"'' is not of the form axis=size"),
        ("dp=2,", r"'' is not of the form axis=size"),
        ("pp=2", r"unknown axis 'pp'; choose axes from dp, sp, tp"),
        ("dp=2,dp=4", r"axis 'dp' is given twice; give each axis once"),
        ("dp=two", r"dp=two is not a whole number; sizes start at 1"),
        ("dp=1.5", r"dp=1.5 is not a whole number"),
        ("dp=0", r"dp=0 is not a size; sizes are whole numbers from 1"),
        ("tp=-4", r"tp=-4 is not a size"),
        (MeshSizes(sp=0), r"sp=0 is not a size"),
        (MeshSizes(dp=True), r"dp=True is not a size"),
    ],
)
def test_bad_mesh(text, message):
    with pytest.raises(MeshError, match=message):
        parse_mesh(text, 8)


def test_placement_has_all_axes_and_auto_types():
    placement = make_placement("dp=2,tp=4")
    assert placement.mesh.axis_names == ("dp", "sp", "tp")
    assert placement.mesh.axis_types == (AxisType.Auto,) * 3
    assert placement.sizes == MeshSizes(dp=2, tp=4)
    assert (placement.platform, placement.chip) == ("cpu", "cpu")
    assert set(placement.mesh.devices.flat) == set(jax.devices())


def test_fewer_devices_than_there_are_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        placement = make_placement("tp=2")
    assert list(placement.mesh.devices.flat) == jax.devices()[:2]
    assert "mesh dp=1,sp=1,tp=2 uses the first 2 of 8 devices" in caplog.text


def test_given_devices():
    devices = jax.devices()[4:6]
    assert list(make_placement("auto", devices=devices).mesh.devices.flat) == devices
    with pytest.raises(MeshError, match="2 devices of platform cpu were given, expected at least one, all of 'tpu'"):
        make_placement(platform="tpu", devices=devices)
    with pytest.raises(MeshError, match="0 devices of platform none"):
        make_placement(devices=[])


def _tpu(index: int, x: int, y: int) -> SimpleNamespace:
    return SimpleNamespace(
        id=index,
        platform="tpu",
        device_kind="TPU v6 lite",
        process_index=0,
        coords=(x, y, 0),
        core_on_chip=0,
        slice_index=0,
    )


def test_tpu_axes_follow_the_interconnect():
    # 4x2 chips: in the driver's order, chips 3 and 4 are not neighbours.
    devices = [_tpu(y * 4 + x, x, y) for y in range(2) for x in range(4)]
    ring = arrange_devices(MeshSizes(sp=8), devices)[0, :, 0]
    hops = [int(np.abs(np.subtract(a.coords, b.coords)).sum()) for a, b in itertools.pairwise([*ring, ring[0]])]
    assert hops == [1] * 8


def test_devices_that_form_no_box_keep_their_order(caplog):
    # Three corners of a square.
    devices = [_tpu(0, 0, 0), _tpu(1, 1, 0), _tpu(2, 0, 1)]
    array = arrange_devices(MeshSizes(sp=3), devices)
    assert [device.id for device in array.flat] == [0, 1, 2]
    assert "collectives may be slower" in caplog.text


def test_abstract_placement_lowers_without_devices():
    placement = abstract_placement(MeshSizes(dp=2, sp=32), platform="tpu", chip="v6e")
    assert placement.sizes.device_count == 64 > len(jax.devices())
    assert placement.mesh.abstract_device.device_kind == "TPU v6 lite"
    sharding = NamedSharding(placement.mesh, PartitionSpec("dp", "sp"))
    x = jax.ShapeDtypeStruct((4, 64), np.float32, sharding=sharding)
    exported = jax.export.export(jax.jit(lambda x: x + 1), platforms=["tpu"])(x)
    assert exported.nr_devices == 64


def test_abstract_placement_checks_its_input():
    with pytest.raises(MeshError, match="platform='rocm2' is unknown; choose from tpu, gpu, cpu"):
        abstract_placement(MeshSizes(), platform="rocm2", chip="x")
    with pytest.raises(MeshError, match="dp=0 is not a size"):
        abstract_placement(MeshSizes(dp=0), platform="tpu", chip="v6e")
