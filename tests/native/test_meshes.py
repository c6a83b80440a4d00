"""The same on eight devices as on one."""

import dataclasses

import pytest
import torch

from tests.native.models import (
    DECIBELS,
    TABLE,
    TOLERANCE,
    compile_model,
    every_architecture,
    models,
    some_architectures,
)

pytestmark = pytest.mark.comfyui


@pytest.fixture(autouse=True)
def _on_eight(eight_devices):
    """Every test here."""


@every_architecture
def test_auto(architecture, watch, cell):
    from tests.native.sampling import relative_error, sample

    cell.at(TABLE, architecture.name, "8 devices, auto")
    plain = models(architecture).plain
    compiled = compile_model(plain, mesh="auto")
    for options in ({}, {"negative_tokens": architecture.tokens[1], "size": 1}):
        expected = sample(plain, architecture, steps=2, **options)
        got = sample(compiled, architecture, steps=2, **options)
        assert cell.error(relative_error(expected, got)) < TOLERANCE, options
    watch.assert_on_devices()


FOUR_HEADS = {
    "Wan 2.1 T2V": {"dim": 512, "num_heads": 4, "num_layers": 2},
    "Wan 2.1 I2V": {"dim": 512, "num_heads": 4, "num_layers": 2},
    "Flux.1": {},
    "Flux.2": {},
    "SD3.5": {},
    "Qwen-Image": {"num_attention_heads": 4, "num_layers": 2},
}


@some_architectures(*FOUR_HEADS)
def test_seed(architecture, watch, cell):
    """tp=4 divides the heads."""
    from tests.native.sampling import relative_error, sample

    cell.at(TABLE, architecture.name, "8 devices, dp=2 × tp=4")
    config = architecture.config | FOUR_HEADS[architecture.name]
    plain = dataclasses.replace(architecture, config=config).build()
    expected = sample(plain, architecture, steps=2)
    got = sample(compile_model(plain, mesh="seed"), architecture, steps=2)
    assert cell.error(relative_error(expected, got)) < TOLERANCE
    watch.assert_on_devices()


@some_architectures("Wan 2.1 T2V")
def test_heads_that_tp_does_not_divide(architecture):
    from comfy_tpu.errors import MeshError
    from tests.native.sampling import sample

    with pytest.raises(MeshError, match="heads=2 is not divisible by tp=4; choose tp from 1, 2"):
        sample(compile_model(models(architecture).plain, mesh="seed"), architecture, steps=1)


@some_architectures("Wan 2.1 T2V", "Flux.1")
def test_weights_are_split(architecture):
    from comfy_tpu.compiler.residency import shared_residency
    from tests.native.sampling import sample

    sizes = {}
    for mesh in ("single", "auto"):
        shared_residency().clear()
        sample(compile_model(models(architecture).plain, mesh=mesh), architecture, steps=1)
        sizes[mesh] = max(shared_residency().bytes_per_device().values())
    assert sizes["auto"] < sizes["single"]


@some_architectures("Wan 2.1 T2V", "Flux.1")
def test_bfloat16(architecture, watch):
    from tests.native.sampling import psnr, sample

    model = architecture.build(dtype=torch.bfloat16)
    expected = sample(model, architecture, steps=2)
    assert (
        psnr(expected, sample(compile_model(model, mesh="auto", precision="bfloat16"), architecture, steps=2))
        > DECIBELS
    )
    watch.assert_on_devices()
