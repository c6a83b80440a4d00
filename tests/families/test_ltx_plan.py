"""What a slice of TPUs would do with LTX-Video, counted in its program; the formulas say the same."""

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import estimate
from comfy_tpu.planning.compilation import count_program
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import parse_size
from comfy_tpu.planning.program import lower_step
from tests.planning.test_plan import check_formulas


def check(tpu: str, sizes: MeshSizes, size: str) -> None:
    model, slice_ = find_model("LTX-Video"), parse_slice(tpu)
    settings = parse_size(size, model)
    work = model.workload(settings)
    program = lower_step(model, settings, work, slice_, sizes)
    result = count_program(program, "partition")
    assert result.unexplained == ()
    assert result.square_arrays == program.facts.square_arrays == ()
    check_formulas(estimate(work, sizes, slice_), program.facts, result)


def test_the_published_size() -> None:
    model = find_model("LTX-Video")
    work = model.workload(model.defaults)
    assert (work.tokens, work.text_tokens, work.layers, work.hidden, work.batch) == (7392, 128, 28, 2048, 2)


@pytest.mark.slow  # as test_flux2_plan.py, which compiles the same blocks
@pytest.mark.parametrize("sizes", [MeshSizes(dp=2, tp=4)], ids=str)
def test_nothing_is_sent_that_nobody_asked_for(sizes: MeshSizes) -> None:
    check("v6e-8", sizes, "512P")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tpu", "sizes", "size"),
    [
        ("v6e-8", MeshSizes(dp=2, sp=4), "512P"),
        ("v6e-8", MeshSizes(dp=2, sp=2, tp=2), "480P"),
        ("v6e-8", MeshSizes(sp=8), "1216x704x257"),
        ("v5p-8", MeshSizes(dp=2, sp=2), "512P"),
    ],
    ids=str,
)
def test_other_layouts(tpu: str, sizes: MeshSizes, size: str) -> None:
    check(tpu, sizes, size)
