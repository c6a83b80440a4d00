"""The model of a run: from a hub id, a demo, a directory, or a small one of a family."""

import dataclasses

import pytest
import torch

from comfy_tpu.bench import machine
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.machine import Bench, check_memory
from comfy_tpu.bench.models import count_step_operations, default_hub_id, find_bench_model, reduce_layers
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families.reference import load_references
from comfy_tpu.families.registry import family_cards

FAMILIES = [card.name for card in family_cards()]
REFERENCED = [card for card in family_cards() if load_references(card)[0]]
"""A family that `port new` wrote has no reference.py."""


@pytest.mark.parametrize("name", [card.name for card in REFERENCED])
def test_every_family_has_a_small_model(name):
    model = find_bench_model(f"small:{name}")
    assert model.is_small
    assert model.reference is not None
    for spec in model.family.components:
        model.config(spec)
    settings = model.forward_settings(model.default_sizes[0], batch=2)
    assert settings.num_videos == 2
    assert model.workload(settings).batch == 2, "one branch"
    tokens = [model.workload(model.forward_settings(size, 1)).tokens for size in model.scaling_sizes()]
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize(
    "hub_id", [hub_id for card in REFERENCED for model in card.models for hub_id in model.published]
)
def test_every_published_model_is_known_whole(hub_id):
    model = find_bench_model(hub_id)
    assert model.name == hub_id
    assert not model.is_small
    assert {spec.name for spec in model.family.components} <= {*model.configs, "transformer_2"}
    for size in model.default_sizes:
        model.settings(size)


def test_names_of_models():
    assert find_bench_model("small").name == f"small:{FAMILIES[0]}"
    assert find_bench_model(default_hub_id().rpartition("/")[2].lower()).name == default_hub_id()
    demo = find_bench_model("demo")
    assert demo.default_sizes == (f"{demo.defaults.width}x{demo.defaults.height}x{demo.defaults.num_frames}",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nobody/nothing",
            "model=nobody/nothing is unknown; choose small, small:FAMILY, demo, a model directory, or",
        ),
        ("small:nobody", f"model=small:nobody names no family; choose from {', '.join(FAMILIES)}"),
    ],
)
def test_unknown_models(name, message):
    with pytest.raises(InvalidValueError, match=message) as caught:
        find_bench_model(name)
    assert caught.value.field == "model"


def test_sizes_are_checked_by_the_card():
    model = find_bench_model("small")
    with pytest.raises(InvalidValueError, match=r"size=97x64x9: width=97 is not divisible by 16") as caught:
        model.settings("97x64x9")
    assert caught.value.field == "size"


def test_a_configuration_that_is_not_known_is_named():
    model = dataclasses.replace(find_bench_model("small"), configs={})
    with pytest.raises(UnsupportedError, match="the configuration of its vae is not built in; give a model directory"):
        model.config(model.family.vae.component)


def test_operations_are_those_of_the_literature():
    """Wan 2.1 14B: N · (4 L² d + 4 L T d) and N · (8 L d² + 4 L d² + 4 L d f), keys and values of the text apart."""
    model = find_bench_model("Wan2.1-T2V-14B-Diffusers")
    linear, attention = count_step_operations(model.workload(model.forward_settings("832x480x81", 1)))
    tokens, text, width, blocks, ffn = 32_760, 512, 5120, 40, 13_824
    assert attention == blocks * 4 * width * (tokens**2 + tokens * text)
    assert linear == pytest.approx(blocks * (12 * tokens * width**2 + 4 * tokens * width * ffn), rel=2e-3)


def test_few_layers():
    config = {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "num_refiner_layers": 1}
    assert reduce_layers(config) == {**config, "num_layers": 2, "num_single_layers": 2}


def test_a_model_that_does_not_fit_is_one_sentence(monkeypatch):
    bench = Bench.open(Job(model="small", dtype="float32"))
    check_memory(bench, {"transformer": 2**20})
    monkeypatch.setattr(machine, "_free_bytes", lambda bench: 2**30)
    message = (
        r"model=small:\w+ needs 6 GiB for the weights of its transformer, vae, once for diffusers and once for "
        r"comfy-tpu \(transformer: 2 GiB each\), and 1 GiB are free here; choose a smaller model, such as --model small"
    )
    with pytest.raises(InvalidValueError, match=message) as caught:
        check_memory(bench, {"transformer": 2**31, "vae": 2**30})
    assert caught.value.field == "model"
    assert bench.torch_refusal is None
    assert bench.dtype == torch.float32
