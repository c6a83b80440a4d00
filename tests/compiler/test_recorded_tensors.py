"""Conversions that are recorded on tensors without data give what they give on tensors with data."""

from pathlib import Path

import pytest
import torch

from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.compiler.recorded_tensors import RecordedSource, record_tensors
from comfy_tpu.errors import UnsupportedError

TENSORS = {"a": torch.arange(24.0).view(6, 4), "b": torch.arange(4.0) - 7, "c": torch.ones(2, 3, dtype=torch.bfloat16)}


class Source:
    path = Path("x.safetensors")

    def __init__(self):
        self.names = []
        self.tensors = {
            name: TensorInfo(name, tuple(each.shape), each.dtype, self.path) for name, each in TENSORS.items()
        }

    def read(self, name):
        self.names.append(name)
        return TENSORS[name]

    def close(self):
        pass


def convert(tensors):
    first, second, third = torch.chunk(tensors["a"], 3, dim=0)
    halves = tensors["a"].split((1, 5))
    return {
        "joined": torch.cat([third, first]),
        "second": second,
        "rest": halves[1][:, 1:3],
        "product": tensors["b"].float() * tensors["a"][0] + 1,
        "column": tensors["b"].reshape(-1, 1).to(torch.bfloat16),
        "c": tensors["c"],
    }


def test_what_is_read_is_what_the_conversion_makes():
    source = Source()
    recorded = RecordedSource(source, convert(record_tensors(source)))
    assert source.names == [], "a conversion reads nothing"
    expected = convert(TENSORS)
    assert set(recorded.tensors) == set(expected)
    for name, tensor in expected.items():
        info = recorded.tensors[name]
        assert (info.name, info.shape, info.dtype) == (name, tuple(tensor.shape), tensor.dtype)
        assert torch.equal(recorded.read(name), tensor)


def test_tensors_come_in_the_order_of_the_file():
    source = Source()
    tensors = record_tensors(source)
    recorded = RecordedSource(source, {"last": tensors["c"], "first": tensors["a"], "middle": tensors["b"]})
    assert list(recorded.tensors) == ["first", "middle", "last"]


def test_a_change_in_place_is_refused():
    tensors = record_tensors(Source())
    with pytest.raises(UnsupportedError, match="changes tensors in place"):
        tensors["a"].mul_(2)
