import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from comfy_tpu.compiler import weights as weights_module
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.weights import SourceWrapper, WeightSlot, abstract_weights, load_weights, update_weights
from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import CheckpointError
from comfy_tpu.parallel.mesh import abstract_placement, make_placement

LAYERS = 3


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    made = {f"blocks.{i}.w": torch.randn(8, 16, generator=generator).to(torch.bfloat16) for i in range(LAYERS)}
    made |= {f"blocks.{i}.b": torch.randn(8, generator=generator) for i in range(LAYERS)}
    made["embed"] = torch.randn(16, 24, generator=generator)
    made["scale"] = torch.tensor(2.5)
    made["ids"] = torch.arange(6, dtype=torch.int32)
    return made


@pytest.fixture
def checkpoint(tmp_path, tensors):
    # A layer's tensors lie in different files, and not in the order of the slots.
    names = sorted(tensors, reverse=True)
    for number in range(2):
        shard = {name: tensors[name] for name in names[number::2]}
        save_file(shard, tmp_path / f"model-{number + 1:05}-of-00002.safetensors")
    return Checkpoint.open(tmp_path)


@pytest.fixture(params=["on the host", "on the devices"])
def stacked(request, monkeypatch):
    """Where layers are stacked: which of the two, a stack's size decides."""
    if request.param == "on the devices":
        monkeypatch.setattr(weights_module, "HOST_STACK_BYTES", 0)
    return request.param


@pytest.fixture
def stacked_on_devices(monkeypatch):
    monkeypatch.setattr(weights_module, "HOST_STACK_BYTES", 0)


def make_slots(placement, dtype=jnp.bfloat16):
    def stack(part, shape, *spec):
        sources = tuple(f"blocks.{i}.{part}" for i in range(LAYERS))
        return WeightSlot(f"blocks.*.{part}", sources, (LAYERS, *shape), dtype, placement.sharding(None, *spec))

    return [
        stack("w", (8, 16), "tp", "sp"),
        stack("b", (8,), "tp"),
        WeightSlot("embed", ("embed",), (16, 24), jnp.float32, placement.sharding(None, ("sp", "tp"))),
        WeightSlot("scale", ("scale",), (), jnp.float32, placement.sharding()),
        WeightSlot("ids", ("ids",), (6,), jnp.int32, placement.sharding()),
    ]


def as_torch(array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array).astype(np.float32))


@pytest.mark.parametrize("mesh", ["single", "sp=2,tp=4", "dp=2,tp=4", "dp=2,sp=2,tp=2"])
@pytest.mark.usefixtures("stacked")
def test_values_dtypes_and_places(mesh, checkpoint, tensors):
    slots = make_slots(make_placement(mesh))
    progress = []
    arrays = load_weights(checkpoint, slots, on_progress=lambda done, total: progress.append((done, total)))
    assert list(arrays) == [slot.name for slot in slots]
    for slot in slots:
        array = arrays[slot.name]
        assert (array.shape, array.dtype) == (slot.shape, slot.dtype)
        assert array.sharding == slot.sharding
        wanted = torch.stack([tensors[name] for name in slot.sources]).reshape(slot.shape)
        if slot.dtype == jnp.bfloat16:
            wanted = wanted.to(torch.bfloat16)
        assert torch.equal(as_torch(array), wanted.float())
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert progress[-1] == (total, total)
    assert [done for done, _ in progress] == sorted({done for done, _ in progress})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("stacked")
def test_every_bit_pattern_arrives(tmp_path, dtype):
    integer = np.uint8 if dtype.itemsize == 1 else np.uint16
    up = np.arange(np.iinfo(integer).max + 1, dtype=integer).reshape(2, -1)
    up[~torch.from_numpy(up).view(dtype).float().isfinite().numpy()] = 0  # NaN and infinity are refused
    down = up[::-1, ::-1].copy()
    save_file(
        {name: torch.from_numpy(bits).view(dtype) for name, bits in (("a", up), ("b", down))},
        tmp_path / "m.safetensors",
    )
    name = jnp.dtype(str(dtype).removeprefix("torch."))
    placement = make_placement("sp=2,tp=4")
    slots = [
        WeightSlot("stack", ("a", "b"), (2, *up.shape), name, placement.sharding(None, "sp", "tp")),
        WeightSlot("plain", ("a",), up.shape, name, placement.sharding("sp", "tp")),
    ]
    arrays = load_weights(Checkpoint.open(tmp_path), slots)
    np.testing.assert_array_equal(np.asarray(arrays["stack"]).view(integer), np.stack([up, down]))
    np.testing.assert_array_equal(np.asarray(arrays["plain"]).view(integer), up)


@pytest.mark.usefixtures("stacked")
def test_equal_dtypes_are_not_converted(checkpoint, monkeypatch):
    seen = []
    real = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, d, *a, **k: seen.append((t.dtype, d)) or real(t, d, *a, **k))
    load_weights(checkpoint, make_slots(make_placement("tp=2")))
    assert (torch.bfloat16, torch.bfloat16) in seen
    assert {target for source, target in seen if source == torch.bfloat16} == {torch.bfloat16}


@pytest.mark.parametrize("mesh", ["single", "tp=2", "dp=2"])
def test_arrays_do_not_share_memory_with_the_file(tmp_path, mesh):
    # 64-byte multiples everywhere: the alignment at which CPU devices take host memory over instead of copying it.
    path = tmp_path / "m.safetensors"
    save_file({f"t{i}": torch.ones(64, 64) for i in range(4)}, path)
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    pad = -(8 + header) % 64
    path.write_bytes((header + pad).to_bytes(8, "little") + data[8 : 8 + header] + b" " * pad + data[8 + header :])
    placement = make_placement(mesh)
    slots = [WeightSlot(f"t{i}", (f"t{i}",), (64, 64), jnp.float32, placement.sharding("tp")) for i in range(4)]
    arrays = load_weights(Checkpoint.open(path), slots)
    with path.open("r+b") as file:
        file.seek(8 + header + pad)
        file.write(b"\0" * (4 * 64 * 64 * 4))
    assert all(np.asarray(array).min() == 1 for array in arrays.values())


def test_stacks_are_written_in_place():
    placement = make_placement("sp=2,tp=4")
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.int32):
        sharding = placement.sharding(None, "tp", "sp")
        kind = ((4, 8, 16), jnp.dtype(dtype), sharding, None)
        stack = weights_module._zeros(*kind)()
        before = [shard.data.unsafe_buffer_pointer() for shard in stack.addressable_shards]
        layer = jax.device_put(jnp.ones((8, 16), dtype), placement.sharding("tp", "sp"))
        position = jax.device_put(np.int32(2), placement.sharding())
        after = weights_module._layer_writer(*kind)(stack, layer, position)
        assert stack.is_deleted()
        assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == before
        assert np.asarray(after).astype(np.float32).sum(axis=(1, 2)).tolist() == [0, 0, 128, 0]


@pytest.mark.usefixtures("stacked_on_devices")
def test_loading_again_compiles_nothing(checkpoint):
    weights_module._layer_writer.cache_clear()
    with count_compilations() as first:
        load_weights(checkpoint, make_slots(make_placement("tp=4")))
    with count_compilations() as second:
        load_weights(checkpoint, make_slots(make_placement("tp=4")))
    assert first.requested > 0
    assert second.requested == 0


def test_small_stacks_compile_nothing(checkpoint):
    with count_compilations() as count:
        load_weights(checkpoint, make_slots(make_placement("sp=2,tp=2")))
    assert count.requested == 0


@pytest.mark.parametrize("limit", [3 * 8 * 16 * 2, 3 * 8 * 16 * 2 - 1])
def test_a_stack_over_the_limit_is_written_on_its_devices(checkpoint, limit, monkeypatch):
    written = []
    real = weights_module._write
    monkeypatch.setattr(weights_module, "_write", lambda *args: written.append(args[1].name) or real(*args))
    monkeypatch.setattr(weights_module, "HOST_STACK_BYTES", limit)
    load_weights(checkpoint, make_slots(make_placement("single")))
    large = ["blocks.*.w"] * 3 if limit < 3 * 8 * 16 * 2 else []
    assert sorted(written) == [*large, "embed", "ids", "scale"]


@pytest.mark.usefixtures("stacked")
def test_updated_layers_are_those_of_the_source(checkpoint, tensors):
    slots = make_slots(make_placement("sp=2,tp=4"))
    arrays = load_weights(checkpoint, slots)
    changed = {"blocks.1.w": tensors["blocks.1.w"] + 1, "embed": tensors["embed"] * 2}

    class Changed(SourceWrapper):
        def read(self, name):
            return changed[name] if name in changed else super().read(name)

    before = dict(arrays)
    moved = update_weights(Changed(checkpoint), slots, arrays, set(changed))
    assert moved == sum(tensor.nbytes for tensor in changed.values())
    for slot in slots:
        wanted = torch.stack([changed.get(name, tensors[name]) for name in slot.sources]).reshape(slot.shape)
        wanted = wanted.to(torch.bfloat16) if slot.dtype == jnp.bfloat16 else wanted
        assert torch.equal(as_torch(arrays[slot.name]), wanted.float())
        assert arrays[slot.name].sharding == slot.sharding
    assert {name for name in arrays if arrays[name] is not before[name]} == {"blocks.*.w", "embed"}


@pytest.mark.usefixtures("stacked")
def test_list_of_one_layer_and_tied_weights(tmp_path):
    save_file({"blocks.0.w": torch.ones(2, 2), "shared": torch.zeros(3)}, tmp_path / "m.safetensors")
    place = make_placement("single").sharding()
    slots = [
        WeightSlot("blocks.*.w", ("blocks.0.w",), (1, 2, 2), jnp.float32, place),
        WeightSlot("one", ("shared",), (3,), jnp.float32, place),
        WeightSlot("two", ("shared",), (3,), jnp.float32, place),
    ]
    arrays = load_weights(Checkpoint.open(tmp_path), slots)
    assert arrays["blocks.*.w"].shape == (1, 2, 2)
    assert float(arrays["blocks.*.w"].sum()) == 4
    assert arrays["one"].shape == arrays["two"].shape == (3,)


def test_unused_tensors_can_be_ignored_by_pattern(checkpoint):
    slots = [slot for slot in make_slots(make_placement("single")) if slot.name != "ids"]
    assert "ids" not in load_weights(checkpoint, slots, ignore_unused=["id*"])


def change(slot, **changes):
    return WeightSlot(**{**{f: getattr(slot, f) for f in slot.__dataclass_fields__}, **changes})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda s: [change(s[0], sources=("blocks.0.w", "no", "nope")), *s[1:]],
            "missing from the checkpoint: no, nope",
        ),
        (lambda s: s[:-1], "the model has no place for them: ids"),
        (
            lambda s: [*s[:2], change(s[2], shape=(24, 16)), *s[3:]],
            r"embed: shape \(16, 24\) in the file, expected \(24, 16\) for embed",
        ),
        (
            lambda s: [change(s[0], shape=(3, 8, 8)), *s[1:]],
            r"(?s)blocks.0.w: shape \(8, 16\) in the file, expected \(8, 8\) for blocks.\*.w.*blocks.2.w: shape",
        ),
        (
            lambda s: [change(s[0], shape=(4, 8, 16)), *s[1:]],
            r"blocks.\*.w: 3 sources for shape \(4, 8, 16\); expected one per",
        ),
        (lambda s: [*s[:4], change(s[4], dtype=jnp.float32)], "ids: dtype int32 in the file, expected float32 for ids"),
        (lambda s: [*s[:2], change(s[2], dtype=jnp.int32), *s[3:]], "embed: dtype float32 in the file, expected int32"),
        (lambda s: [*s[:4], change(s[4], dtype=jnp.int16)], "ids: dtype int32 in the file, expected int16"),
        (lambda s: [*s[:2], change(s[2], dtype=np.dtype("float64")), *s[3:]], "embed: jax holds no float64 unless"),
        (lambda s: [*s, s[3]], "two slots are named scale"),
        (
            lambda s: [*s[:4], change(s[4], sharding=make_placement("tp=4").sharding("tp"))],
            r"ids: shape \(6,\) cannot be sharded",
        ),
        (
            lambda s: [change(s[0], sharding=make_placement("tp=3").sharding("tp")), *s[1:]],
            r"blocks.\*.w: its layer dimension is split",
        ),
        (
            lambda s: [
                *s[:4],
                change(s[4], sharding=abstract_placement(MeshSizes(), platform="tpu", chip="v6e").sharding()),
            ],
            "ids: its mesh has no devices; load onto a placement made by make_placement",
        ),
    ],
)
def test_misfits_are_told_before_anything_is_read(checkpoint, edit, message, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read before the check"))
    with pytest.raises(CheckpointError, match=message) as error:
        load_weights(checkpoint, edit(make_slots(make_placement("single"))))
    assert "does not fit the model" in str(error.value)
    assert "nothing was loaded" in str(error.value)


def test_all_misfits_come_in_one_error(checkpoint):
    slots = make_slots(make_placement("single"))
    slots = [change(slots[0], shape=(3, 9, 9)), change(slots[2], dtype=jnp.int32), *slots[3:4]]
    slots.append(WeightSlot("x", ("absent",), (1,), jnp.float32, slots[0].sharding))
    with pytest.raises(
        CheckpointError, match=r"(?s)blocks.0.w: shape.*embed: dtype.*missing.*: absent.*no place.*: blocks.\d.b"
    ):
        load_weights(checkpoint, slots)


def test_many_misfits_are_counted_in_one_sentence(tmp_path):
    save_file({f"t{i}": torch.ones(2) for i in range(30)}, tmp_path / "m.safetensors")
    place = make_placement("single").sharding()
    slots = [WeightSlot(f"t{i}", (f"t{i}",), (3,), jnp.float32, place) for i in range(30)]
    slots += [WeightSlot(f"x{i}", (f"x{i}",), (3,), jnp.float32, place) for i in range(12)]
    with pytest.raises(CheckpointError) as error:
        load_weights(Checkpoint.open(tmp_path), slots)
    wrong = "; ".join(f"t{i}: shape (2,) in the file, expected (3,) for t{i}" for i in range(3))
    assert str(error.value) == (
        f"checkpoint {tmp_path} does not fit the model: {wrong} and 27 more; missing from the checkpoint: x0, x1, x2 "
        "and 9 more; nothing was loaded; check that the checkpoint and the model's config belong together"
    )


def test_a_prefix_of_all_names_is_told(tmp_path):
    names = [f"blocks.{i}.w" for i in range(5)]
    save_file({f"model.diffusion_model.{name}": torch.ones(2) for name in names}, tmp_path / "m.safetensors")
    place = make_placement("single").sharding()
    slots = [WeightSlot(name, (name,), (2,), jnp.float32, place) for name in names]
    with pytest.raises(CheckpointError) as error:
        load_weights(Checkpoint.open(tmp_path), slots)
    assert (
        " does not fit the model: its names have the prefix model.diffusion_model., the model's do not; missing from "
        "the checkpoint: blocks.0.w, blocks.1.w, blocks.2.w and 2 more; in the checkpoint, but the model has no place "
        "for them: model.diffusion_model.blocks.0.w, "
    ) in str(error.value)


@pytest.mark.parametrize("failure", ["progress", "read", "interrupt"])
@pytest.mark.usefixtures("stacked")
def test_nothing_stays_when_loading_fails(checkpoint, failure, monkeypatch):
    slots = make_slots(make_placement("sp=2,tp=4"))
    held = {id(array) for array in jax.live_arrays()}
    calls = []

    def count(*_):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt if failure == "interrupt" else OSError("disk is gone")

    if failure == "read":
        real = Checkpoint.read
        monkeypatch.setattr(Checkpoint, "read", lambda self, name: (count(), real(self, name))[1])
    # The error is kept, and with it the frames that hold the arrays: only deleting them frees their memory.
    with pytest.raises((OSError, KeyboardInterrupt)) as kept:
        load_weights(checkpoint, slots, on_progress=None if failure == "read" else count)
    assert len(calls) == 6
    left = [a for a in jax.live_arrays() if id(a) not in held and not a.is_deleted() and a.size > 1]
    assert left == []
    assert kept is not None


@pytest.mark.usefixtures("stacked")
def test_files_are_read_in_sequence(checkpoint, monkeypatch):
    read = []
    real = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: read.append(name) or real(self, name))
    load_weights(checkpoint, make_slots(make_placement("single")))
    assert read == list(checkpoint.tensors)


@pytest.mark.usefixtures("stacked_on_devices")
def test_one_tensor_is_on_its_way_while_the_next_is_read(checkpoint, monkeypatch):
    seen, put_arrays, waited = [], [], []
    read, put, wait = Checkpoint.read, weights_module.put, jax.block_until_ready

    def reading(self, name):
        seen.append([number for number, array in enumerate(put_arrays) if not any(array is each for each in waited)])
        return read(self, name)

    def putting(*arguments, **options):
        put_arrays.append(put(*arguments, **options))
        return put_arrays[-1]

    def waiting(tree):
        waited.extend(jax.tree.leaves(tree))
        return wait(tree)

    monkeypatch.setattr(Checkpoint, "read", reading)
    monkeypatch.setattr(weights_module, "put", putting)
    monkeypatch.setattr(jax, "block_until_ready", waiting)
    loaded = load_weights(checkpoint, make_slots(make_placement("single")))
    assert seen == [[]] + [[number] for number in range(len(checkpoint.tensors) - 1)]
    assert all(any(array is each for each in waited) for array in loaded.values())


def test_abstract_weights_lower_without_memory(checkpoint):
    placement = make_placement("sp=2,tp=4")
    slots = [WeightSlot("big", ("big",), (4, 2**20, 2**14), jnp.bfloat16, placement.sharding(None, "tp", "sp"))]
    weights = abstract_weights(slots)
    assert weights["big"].sharding == slots[0].sharding
    assert slots[0].bytes_per_device == 4 * 2**34 * 2 // 8
    assert "16384" in jax.jit(lambda w: w["big"].sum()).lower(weights).as_text()


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large")
    for name, layers in (("warm", 2), ("model", 48)):
        (directory / name).mkdir()
        for part in range(2):
            span = range(part * layers // 2, (part + 1) * layers // 2)
            made = {f"blocks.{i}.{p}": torch.full((1024, 2048), i, dtype=torch.bfloat16) for i in span for p in "ab"}
            if part == 0:
                made["embed"] = torch.ones(8192, 1024, dtype=torch.bfloat16)
            save_file(made, directory / name / f"model-{part + 1:05}-of-00002.safetensors")
    yield directory
    for path in directory.rglob("*.safetensors"):
        path.unlink()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is a Linux figure")
@pytest.mark.parametrize(
    ("devices", "whole"), [(8, False), *(pytest.param(1, whole, marks=pytest.mark.slow) for whole in (False, True))]
)
def test_peak_memory_stays_near_the_resident_arrays(large_checkpoint, devices, whole):
    size = sum(path.stat().st_size for path in (large_checkpoint / "model").iterdir())
    assert size > 400e6
    root = Path(__file__).parents[2]
    script = [sys.executable, Path(__file__).with_name("load_in_fresh_process.py"), large_checkpoint, "48"]
    flags = f"--xla_force_host_platform_device_count={devices}"
    run = subprocess.run(
        [*script, "whole"] if whole else script,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["last"] == 47
    assert figures["devices"] == devices
    assert figures["resident"] >= 0.99 * size
    over = figures["peak"] - figures["resident"]
    # Reading the whole file first must break the bound: otherwise the bound proves nothing.
    assert (over < size / 4) is not whole, f"{over / 1e6:.0f} MB over the arrays for {size / 1e6:.0f} MB"
