"""Families that `comfy-tpu port new` wrote beside diffusers' own pipelines, with small random weights.

Each adds one file to tests/families/ported; there is nothing to edit here.
"""

import importlib
from pathlib import Path

import pytest

from comfy_tpu.porting.parity import (
    CHANGES,
    MESHES,
    SAME,
    ParityCase,
    generate,
    generate_with_diffusers,
    load_transformer,
    open_case,
    psnr,
)

NAMES = sorted(path.stem for path in (Path(__file__).parent / "ported").glob("*.py"))


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> ParityCase:
    found: ParityCase = importlib.import_module(f"tests.families.ported.{request.param}").CASE
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_the_result_is_that_of_diffusers(case: ParityCase, mesh: str) -> None:
    expected = generate_with_diffusers(case)
    assert expected.std() > 0.05, "the reference shows something"
    assert psnr(generate(case, mesh), expected) >= SAME


def test_prompt_guidance_and_seed_change_the_result(case: ParityCase) -> None:
    first = generate(case)
    for change in CHANGES:
        assert psnr(generate(case, **change), first) < SAME - 20, change


def test_the_model_directory_is_of_this_family(case: ParityCase) -> None:
    assert open_case(case).family.name == case.model


def test_every_weight_has_one_sharding_rule(case: ParityCase) -> None:
    load_transformer(case, "sp=2,tp=4")
