import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import MeshError
from comfy_tpu.parallel.chips import CHIPS, find_slice, parse_slice


@pytest.mark.parametrize(
    ("text", "chip", "chips", "devices", "topology", "name"),
    [
        ("v6e-8", "v6e", 8, 8, "2x4", "v6e-8"),
        ("v5litepod-16", "v5e", 16, 16, "4x4", "v5e-16"),
        ("v5p-8", "v5p", 4, 4, "2x2x1", "v5p-8"),
        ("tpu7x-8", "v7x", 4, 8, "2x2x1", "v7x-8"),
        (" V6E-256 ", "v6e", 256, 256, "16x16", "v6e-256"),
        ("v5p-512", "v5p", 256, 256, "4x8x8", "v5p-512"),
        ("v6e-1", "v6e", 1, 1, "1x1", "v6e-1"),
    ],
)
def test_slices(text, chip, chips, devices, topology, name):
    found = parse_slice(text)
    assert (found.chip.name, found.chips, found.device_count) == (chip, chips, devices)
    assert (found.topology, found.name) == (topology, name)


@pytest.mark.parametrize("text", ["v6e-0", "v6e-3", "v6e-512", "v5p-3", "v5p-1", "v7x-1024", "v6e-99999999999"])
def test_sizes_that_there_are_not(text):
    with pytest.raises(MeshError, match=r"tpu='v.*'( is no slice of 1 to 256 chips.*choose from v| is not a slice)"):
        parse_slice(text)


def test_a_name_that_counts_cores_says_so():
    with pytest.raises(MeshError, match=r"\(v5p-N counts 2 cores a chip\); choose from v5p-2, v5p-4, v5p-8"):
        parse_slice("v5p-3")


@pytest.mark.parametrize("text", ["v9-8", "h200-8"])
def test_unknown_generation(text):
    with pytest.raises(MeshError, match="unknown generation .* choose from v5e, v5p, v6e, v7x"):
        parse_slice(text)


@pytest.mark.parametrize("text", ["", "v6e", "8", "v6e-", "v6e-8-8", "v6e--8", "v6e-8.5"])
def test_no_slice_at_all(text):
    with pytest.raises(MeshError, match="is not a slice; write a generation and a number, such as v6e-8"):
        parse_slice(text)


def test_doubling_ends_at_256_chips():
    slice_, names = parse_slice("v5p-128"), []
    while (slice_ := slice_.next_larger()) is not None:
        names.append(slice_.name)
    assert names == ["v5p-256", "v5p-512"]


def test_slices_of_attached_devices():
    assert find_slice("v6e", 8) == parse_slice("v6e-8")
    assert find_slice("v7x", 8) == parse_slice("v7x-8")
    assert find_slice("v6e", 3) == parse_slice("v6e-4"), "a part of a slice"
    assert find_slice("cpu", 8) is None
    assert find_slice("h200", 8) is None


def test_a_device_of_v7x_is_half_a_chip():
    v7x = CHIPS["v7x"]
    assert v7x.flops * v7x.devices_per_chip == 2307e12
    assert v7x.memory_bytes * v7x.devices_per_chip == 192_000_000_000


@pytest.mark.parametrize(
    ("text", "devices", "hosts", "name"),
    [
        ("v6e-8", 8, 1, "v6e-8"),
        ("v6e-16", 16, 4, "v6e-16"),
        ("v5litepod-8", 8, 1, "v5e-8"),
        ("v5p-8", 4, 1, "v5p-8"),
        ("v5p-16", 8, 2, "v5p-16"),
        ("tpu7x-16", 16, 2, "v7x-16"),
        ("2xv6e-8", 16, 2, "2xv6e-8"),
        ("1xv6e-8", 8, 1, "v6e-8"),
        (" 4xv5litepod-16 ", 64, 16, "4xv5e-16"),
    ],
)
def test_hosts_and_slices(text, devices, hosts, name):
    found = parse_slice(text)
    assert (found.device_count, found.host_count, found.name) == (devices, hosts, name)
    assert parse_slice(found.name) == found


@pytest.mark.parametrize("text", ["0xv6e-8", "65xv6e-8", "2x2xv6e-8"])
def test_no_number_of_slices(text):
    with pytest.raises(MeshError, match="is no number of slices; ask for 1 to 64: 2xv6e-8"):
        parse_slice(text)


@pytest.mark.parametrize(
    ("text", "sizes", "axes"),
    [
        ("v6e-16", MeshSizes(dp=2, sp=8), ()),
        ("2xv6e-8", MeshSizes(dp=2, sp=8), ("dp",)),
        ("2xv6e-8", MeshSizes(dp=2, sp=2, tp=4), ("dp",)),
        ("2xv6e-8", MeshSizes(sp=16), ("sp",)),
        ("2xv6e-8", MeshSizes(sp=2, tp=8), ("sp",)),
        ("4xv6e-4", MeshSizes(dp=2, tp=8), ("dp", "tp")),
    ],
)
def test_axes_that_cross_slices(text, sizes, axes):
    assert parse_slice(text).crossing_axes(sizes) == axes
