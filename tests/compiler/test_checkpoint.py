import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from comfy_tpu.compiler import checkpoint as checkpoint_module
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.errors import CheckpointError

INDEX = "diffusion_pytorch_model.safetensors.index.json"


def write_sharded(
    directory: Path, index: str = INDEX, shards=("a.safetensors", "b.safetensors"), value: float = 1.0
) -> Path:
    directory.mkdir(exist_ok=True)
    weight_map = {}
    for number, shard in enumerate(shards):
        tensors = {
            f"t{number}": torch.full((2, 3), value + number, dtype=torch.bfloat16),
            f"n{number}": torch.arange(4),
        }
        save_file(tensors, directory / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def rewrite_index(directory: Path, change) -> None:
    data = json.loads((directory / INDEX).read_text())
    change(data["weight_map"])
    (directory / INDEX).write_text(json.dumps(data))


def test_single_file_knows_its_tensors_without_reading(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"b": torch.ones(5, 2, dtype=torch.float8_e4m3fn), "a": torch.tensor(3.0)}, path)
    opened = Checkpoint.open(path)
    assert set(opened.tensors) == {"a", "b"}
    info = opened.tensors["b"]
    assert (info.shape, info.dtype, info.nbytes, info.file) == ((5, 2), torch.float8_e4m3fn, 10, path)
    assert opened.read("a").item() == 3.0
    assert opened.read("b").float().sum() == 10


@pytest.mark.parametrize(
    "index",
    [
        INDEX,
        "model.safetensors.index.json",
        "model.fp16.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "model.safetensors.fp16.index.json",
    ],
)
def test_index(tmp_path, index):
    directory = write_sharded(tmp_path / "m", index)
    (directory / "notes.json").write_text("{}")
    for path in (directory, directory / index):
        opened = Checkpoint.open(path)
        assert opened.read("t1").tolist() == [[2.0] * 3] * 2
        assert opened.read("n0").tolist() == [0, 1, 2, 3]


def test_tensors_are_in_disk_order(tmp_path):
    # safetensors sorts by alignment, so the names' order is not the disk's.
    save_file({"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(3)}, tmp_path / "m.safetensors")
    assert list(Checkpoint.open(tmp_path).tensors) == ["b", "a"]


def test_directory_without_index(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "wan2.1_t2v-00001-of-00002.safetensors")
    save_file({"y": torch.ones(1)}, tmp_path / "wan2.1_t2v-00002-of-00002.safetensors")
    assert set(Checkpoint.open(tmp_path).tensors) == {"x", "y"}
    (tmp_path / "wan2.1_t2v-00001-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="lacks wan2.1_t2v-00001-of-00002.safetensors, .*download the missing files"
    ):
        Checkpoint.open(tmp_path)


def test_variants(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
    assert Checkpoint.open(tmp_path).read("x").item() == 0
    assert Checkpoint.open(tmp_path, variant="fp16").read("x").item() == 1
    with pytest.raises(CheckpointError, match="has no variant 'bf16'; its variants: fp16"):
        Checkpoint.open(tmp_path, variant="bf16")


def test_variants_with_shards(tmp_path):
    write_sharded(tmp_path, "model.safetensors.index.json", ["model-00001-of-00001.safetensors"], 1.0)
    write_sharded(tmp_path, "model.safetensors.index.fp16.json", ["model.fp16-00001-of-00001.safetensors"], 5.0)
    assert Checkpoint.open(tmp_path).read("t0")[0, 0] == 1
    assert Checkpoint.open(tmp_path, variant="fp16").read("t0")[0, 0] == 5


def test_several_indexes(tmp_path):
    write_sharded(tmp_path, "a.safetensors.index.json")
    write_sharded(tmp_path, "b.safetensors.index.json")
    with pytest.raises(
        CheckpointError, match=r"several indexes \(a.safetensors.index.json, b.safetensors.index.json\); give"
    ):
        Checkpoint.open(tmp_path)


def test_files_are_mapped_anew_after_a_bounded_number_of_bytes(tmp_path, monkeypatch):
    save_file({f"t{i}": torch.full((1024,), float(i)) for i in range(8)}, tmp_path / "m.safetensors")
    opened = Checkpoint.open(tmp_path)
    opens = []
    real = checkpoint_module.safe_open
    monkeypatch.setattr(checkpoint_module, "safe_open", lambda *a, **k: opens.append(a) or real(*a, **k))
    monkeypatch.setattr(checkpoint_module, "REMAP_BYTES", 2 * 4096)
    held = [opened.read(f"t{i}") for i in range(8)]
    assert len(opens) == 4
    assert [int(tensor[0]) for tensor in held] == list(range(8))


def test_missing_path(tmp_path):
    with pytest.raises(
        CheckpointError, match="nope.safetensors does not exist; give a .safetensors file or a directory"
    ):
        Checkpoint.open(tmp_path / "nope.safetensors")


@pytest.mark.parametrize("name", ["model.bin", "model.ckpt", "model.pt"])
def test_pickles_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=f"(?s)only {name}: such files are pickles, .* runs the code .*save_file"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} is not read: such files are pickles"):
        Checkpoint.open(tmp_path / name)


def test_a_named_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # or the library would wait for one, and could not be interrupted
    try:
        with pytest.raises(CheckpointError, match=r"model.safetensors is not a file; download it again"):
            Checkpoint.open(tmp_path)
    finally:
        os.close(writer)


def test_other_formats_and_empty_directories(tmp_path):
    with pytest.raises(CheckpointError, match="has no .safetensors files; download them, or give the directory of"):
        Checkpoint.open(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="m.gguf is a GGUF file, .*; use the model's safetensors file"):
        Checkpoint.open(tmp_path / "m.gguf")


def _header(entries: dict) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:40],
        lambda data: data[:-10],
        lambda data: data + b"xx",
        lambda data: os.urandom(4) + b"\xff" * 4 + data[8:],
        lambda data: data[:8] + b"\xff" * 20 + data[28:],
        lambda data: b"\x80\x04pickle" + b"." * 100,
    ],
    ids=["empty", "cut in length", "cut in header", "cut in data", "longer", "length", "header", "pickle"],
)
def test_damaged_file(tmp_path, damage):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(100)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        CheckpointError, match=r"m.safetensors cannot be read as safetensors \(.*truncated, damaged or of ano"
    ):
        Checkpoint.open(tmp_path)


def test_no_tensors(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(_header({}))
    with pytest.raises(CheckpointError, match="holds no tensors; download it again"):
        Checkpoint.open(tmp_path)


def test_dtype_that_torch_lacks(tmp_path):
    entry = {"a": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}
    (tmp_path / "m.safetensors").write_bytes(_header(entry) + b"123456")
    with pytest.raises(CheckpointError, match="a has dtype F6_E2M3, expected one of BOOL, .*convert it first"):
        Checkpoint.open(tmp_path)


def test_file_that_changes_after_it_was_opened(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(4)}, path)
    opened = Checkpoint.open(path)
    path.unlink()
    save_file({"a": torch.ones(5)}, path)
    with pytest.raises(CheckpointError, match=r"changed while it was being read \(a\); load the checkpoint again"):
        opened.read("a")
    path.unlink()
    opened.close()
    with pytest.raises(CheckpointError, match="cannot be read as safetensors .*it has None bytes"):
        opened.read("a")


def test_missing_shard(tmp_path):
    directory = write_sharded(tmp_path / "m")
    (directory / "b.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=f"lacks b.safetensors, which should be there according to {INDEX}; download"
    ):
        Checkpoint.open(directory)


def test_index_and_shards_disagree(tmp_path):
    directory = write_sharded(tmp_path / "m")
    rewrite_index(directory, lambda weights: weights.update(ghost="a.safetensors"))
    with pytest.raises(
        CheckpointError, match="its shards disagree .not in the shard it names: ghost.; download index and"
    ):
        Checkpoint.open(directory)
    rewrite_index(directory, lambda weights: (weights.pop("ghost"), weights.pop("t1")))
    with pytest.raises(CheckpointError, match="in a shard but not in the index: t1"):
        Checkpoint.open(directory)
    rewrite_index(directory, lambda weights: weights.update(t1="a.safetensors"))
    with pytest.raises(CheckpointError, match="not in the shard it names: t1"):
        Checkpoint.open(directory)


def test_tensor_in_two_shards(tmp_path):
    directory = write_sharded(tmp_path / "m")
    save_file({"t0": torch.zeros(1), "t1": torch.zeros(1), "n1": torch.zeros(1)}, directory / "b.safetensors")
    with pytest.raises(
        CheckpointError, match=r"tensor t0 is in both .*a.safetensors and b.safetensors; remove the file"
    ):
        Checkpoint.open(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"index .* cannot be read \(.*\); download it again"):
        Checkpoint.open(tmp_path)


def test_index_must_stay_in_its_directory(tmp_path):
    directory = write_sharded(tmp_path / "m")
    rewrite_index(directory, lambda weights: weights.update(t0="../a.safetensors"))
    with pytest.raises(CheckpointError, match="names files outside its directory: ../a.safetensors; do not trust it"):
        Checkpoint.open(directory)
