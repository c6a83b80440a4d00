"""Names and columns of a checkpoint as the module wants them."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.packed_weights import ConvertedSource, PackedWeight, pack_features, pack_weight, unpack_features

PACKED = (PackedWeight("blocks.*.out.weight", (4, 8)),)


def test_each_device_has_its_share_of_every_part() -> None:
    one, other = torch.randn(3, 4), torch.randn(3, 8)
    packed = pack_features((one, other), 2)
    first, second = packed.chunk(2, dim=-1)
    assert torch.equal(first, torch.cat((one[:, :2], other[:, :4]), dim=-1))
    assert torch.equal(second, torch.cat((one[:, 2:], other[:, 4:]), dim=-1))
    assert torch.equal(pack_features((one, other), 1), torch.cat((one, other), dim=-1))


def test_a_packed_weight_computes_the_same_with_packed_features() -> None:
    one, other, weight = torch.randn(3, 4).double(), torch.randn(3, 8).double(), torch.randn(5, 12).double()
    plain = torch.cat((one, other), dim=-1) @ weight.T
    for tp in (1, 2, 4):
        columns = pack_weight("blocks.0.out.weight", weight, PACKED, tp)
        torch.testing.assert_close(pack_features((one, other), tp) @ columns.T, plain)
    assert pack_weight("blocks.0.in.weight", weight, PACKED, 4) is weight


def test_a_weight_with_packed_rows_answers_packed_features() -> None:
    x, weight = torch.randn(3, 5).double(), torch.randn(20, 5).double()
    rows = (PackedWeight("blocks.*.in.weight", (4, 8, 8), dimension=0),)
    plain = (x @ weight.T).split((4, 8, 8), dim=-1)
    for tp in (1, 2, 4):
        answer = x @ pack_weight("blocks.0.in.weight", weight, rows, tp).T
        for actual, wanted in zip(unpack_features(answer, (4, 8, 8), tp), plain, strict=True):
            torch.testing.assert_close(actual, wanted)
        # The first device's rows are its share of every part.
        torch.testing.assert_close(answer[:, : 20 // tp], pack_features([p[:, : p.shape[1] // tp] for p in plain], 1))


def test_a_source_under_other_names(tmp_path: Path) -> None:
    weight, bias = torch.randn(5, 12), torch.randn(5)
    save_file({"model.blocks.0.out.weight": weight, "model.bias": bias}, tmp_path / "model.safetensors")
    source = ConvertedSource(
        Checkpoint.open(tmp_path), rename=lambda name: name.removeprefix("model."), packed=PACKED, tp=2
    )
    assert set(source.tensors) == {"blocks.0.out.weight", "bias"}
    assert source.tensors["bias"].name == "bias"
    assert torch.equal(source.read("bias"), bias)
    packed = pack_features(weight.split((4, 8), dim=1), 2)
    assert torch.equal(source.read("blocks.0.out.weight"), packed)
    source.close()
