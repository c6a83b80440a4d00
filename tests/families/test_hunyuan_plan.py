"""What a slice of TPUs would do with HunyuanVideo-1.5, counted in its program; the formulas say the same."""

import dataclasses

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import estimate
from comfy_tpu.planning.compilation import count_program
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import parse_size
from comfy_tpu.planning.program import lower_step

TEXT = "HunyuanVideo-1.5-Diffusers-720p_t2v"
PICTURE = "HunyuanVideo-1.5-Diffusers-720p_i2v"


def check(name: str, sizes: MeshSizes) -> None:
    """With two blocks of 54, which are one in the program: what is sent once a step then weighs 27 times as much."""
    model, slice_ = find_model(name), parse_slice("v6e-8")
    model = dataclasses.replace(model, config={**model.config, "num_layers": 2})
    settings = parse_size("720P", model)
    work = model.workload(settings)
    program = lower_step(model, settings, work, slice_, sizes)
    result, guess = count_program(program, "partition"), estimate(work, sizes, slice_)
    assert result.unexplained == ()
    assert result.square_arrays == ()
    # The refiner of the text, two blocks over 1,000 tokens, is in no formula.
    assert guess.sent_bytes == pytest.approx(result.sent_bytes, rel=0.01)
    for cause in ("sum over columns (tp)", "weight gather", "prediction gather"):
        told, found = (sum(item.nbytes for item in each.traffic if item.cause == cause) for each in (guess, result))
        assert told == pytest.approx(found, rel=1e-6), cause


@pytest.mark.slow  # by default Wan in tests/planning, Flux.2 and LTX-Video beside this file
@pytest.mark.parametrize("sizes", [MeshSizes(dp=2, sp=4)], ids=str)
def test_nothing_is_sent_that_nobody_asked_for(sizes: MeshSizes) -> None:
    check(TEXT, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (TEXT, MeshSizes(dp=2, tp=4)),
        (TEXT, MeshSizes(sp=8)),
        (TEXT, MeshSizes(dp=2, sp=2, tp=2)),
        (PICTURE, MeshSizes(dp=2, sp=4)),
    ],
    ids=str,
)
def test_other_layouts(name: str, sizes: MeshSizes) -> None:
    check(name, sizes)
