"""The module at fault is found: a wrong layer, wrong code between layers, a wrong operator. A right model agrees."""

import json

import jax.numpy as jnp
import pytest
import torch
from safetensors.torch import save_file

from comfy_tpu.bridge.environment import environment
from comfy_tpu.bridge.operators import Operator
from comfy_tpu.cli.main import main

TRACED = "(type(x) is not torch.Tensor)"
"""In the source of a model: whether it is traced, which is how a model here is wrong only in its compiled form."""

SOURCE = """
import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x, *, shift):
        return {"scaled": x * self.gain + shift + LAYER}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scale, self.activation = nn.LayerNorm(8), Scale(), nn.GELU()

    def forward(self, x, cache):
        cache.append(x)
        y = self.activation(self.scale(self.norm(x) + BETWEEN, shift=len(cache))["scaled"])
        return x + self.norm(y)


class Model(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x):
        cache = []
        for block in self.blocks:
            x = block(x, cache)
        return x
"""


@pytest.fixture
def write(tmp_path):
    def write(*, layer="0", between="0"):
        path = tmp_path / "model.py"
        path.write_text(SOURCE.replace("LAYER", layer).replace("BETWEEN", between))
        return path

    return write


def bisect(capsys, path, *arguments):
    words = ["port", "bisect", f"{path}:Model", "--inputs", '{"x": [2, 3, 8]}', *map(str, arguments)]
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_right_model_agrees(capsys, write):
    status, out, _ = bisect(capsys, write())
    assert status == 0
    assert out.endswith("\n\nIt agrees with PyTorch.\n")


def test_a_wrong_layer(capsys, write):
    """In the second block only: its first call has a cache of one."""
    status, out, _ = bisect(capsys, write(layer=f"0.5 * {TRACED} * (shift > 1)"))
    assert status == 1
    table = [line.split() for line in out.splitlines()[3:7]]
    assert [row[:-1] for row in table] == [
        ["module", "class", "call"],
        ["(the", "model)", "Model", "1"],
        ["blocks.1", "Block", "1"],
        ["blocks.1.scale", "Scale", "1"],
    ]
    assert all(float(row[-1]) > 1e-3 for row in table[1:])
    assert "The first that differs is blocks.1.scale (Scale) at " in out
    assert "model.py:6: it calls no other module, so its operators do it." in out


def test_wrong_code_between_layers_is_not_the_layers(capsys, write):
    status, out, _ = bisect(capsys, write(between=f"{TRACED} * x"), "--json")
    document = json.loads(out)
    (model,) = document["models"]
    assert (status, document["schema"], document["differs"]) == (1, 1, True)
    assert [call["path"] for call in model["path"]] == ["", "blocks.0"]
    assert model["culprit"] == model["path"][-1]
    assert (model["dtype"], model["tolerance"]) == ("float32", 0.001)
    assert model["culprit"]["error"] > 0.001


def test_a_wrong_operator(capsys, write, monkeypatch):
    def gelu(input, *, approximate="none"):
        return jnp.maximum(input, 0)

    active = environment()
    monkeypatch.setattr(active, "_ops", dict(active._ops))
    active.install(Operator(torch.nn.functional.gelu, gelu, on_torch=False))
    status, out, _ = bisect(capsys, write())
    assert status == 1
    assert "The first that differs is blocks.0.activation (GELU) at " in out


def test_real_weights_and_a_wider_tolerance(capsys, write, tmp_path):
    path, directory = write(layer=f"0.02 * {TRACED}"), tmp_path / "weights"
    directory.mkdir()
    (directory / "config.json").write_text('{"depth": 1, "_class_name": "Model"}')
    names = ("norm.weight", "norm.bias", "scale.gain")
    save_file({f"blocks.0.{name}": torch.linspace(0.5, 1.5, 8) for name in names}, directory / "model.safetensors")
    status, out, _ = bisect(capsys, path, "--checkpoint", directory)
    assert status == 1
    assert "blocks.0.scale (Scale)" in out
    assert bisect(capsys, path, "--checkpoint", directory, "--tolerance", "0.5")[0] == 0
    assert bisect(capsys, path, "--checkpoint", directory, "--dtype", "bfloat16")[0] == 0
    (directory / "config.json").write_text('{"depth": 2}')
    status, out, err = bisect(capsys, path, "--checkpoint", directory)
    assert (status, out) == (1, "")
    assert err.startswith(f"comfy-tpu: --checkpoint {directory} cannot be loaded into Model (")
    assert "blocks.1.norm.weight" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "float16"], "--dtype 'float16' is unknown; choose from float32, bfloat16"),
        (["--tolerance", "much"], "--tolerance much is not allowed; give a number between 0 and 1"),
        (["--tolerance", "nan"], "--tolerance nan is not allowed; give a number between 0 and 1"),
        (["--tolerance", "0"], "--tolerance 0.0 is not allowed; give a number between 0 and 1"),
        (["--checkpoint", ""], "--checkpoint is empty; give a path"),
        (["--checkpoint", "absent"], "--checkpoint absent has no .safetensors files; give the directory of one model"),
        (["--inputs", '{"y": [1]}'], "--inputs names 'y', which forward does not take; it takes x"),
        (["--config", "[]"], "--config is a list, expected an object"),
    ],
)
def test_what_cannot_be_used_is_refused(capsys, write, arguments, said):
    status, out, err = bisect(capsys, write(), *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"comfy-tpu: {said}")
    assert err.count("\n") == 1
