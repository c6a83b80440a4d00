"""What a slice of TPUs would do with Flux.1, counted in its program; the formulas say the same."""

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import estimate, rank_layouts
from comfy_tpu.planning.compilation import count_program
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import parse_size
from comfy_tpu.planning.program import lower_step
from tests.planning.test_plan import check_formulas


def check(name: str, tpu: str, sizes: MeshSizes, size: str) -> None:
    model, slice_ = find_model(name), parse_slice(tpu)
    settings = parse_size(size, model)
    work = model.workload(settings)
    program = lower_step(model, settings, work, slice_, sizes)
    result = count_program(program, "partition")
    assert result.unexplained == ()
    assert result.square_arrays == program.facts.square_arrays == ()
    check_formulas(estimate(work, sizes, slice_), program.facts, result)


def test_dev_on_eight_chips() -> None:
    model, slice_ = find_model("FLUX.1-dev"), parse_slice("v6e-8")
    work = model.workload(parse_size("1024x1024x1", model))
    assert (work.tokens, work.sequence, work.batch, work.layers) == (4096, 4608, 1, 57)
    best = rank_layouts(work, slice_)[0]
    assert best.fits
    assert best.sizes.tp > 1, "gathering all weights for so few tokens would take most of the step"
    # The published count of parameters.
    weights = sum(times * matrix.nbytes / matrix.itemsize for times, matrix in work.matrices)
    assert weights == pytest.approx(11.9e9, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tpu", "sizes", "size"),
    [
        ("FLUX.1-dev", "v6e-8", MeshSizes(sp=2, tp=4), "1024"),  # what auto takes
        ("FLUX.1-dev", "v6e-8", MeshSizes(tp=8), "1024"),
        ("FLUX.1-dev", "v6e-8", MeshSizes(sp=8), "1024"),
        ("FLUX.1-dev", "v6e-8", MeshSizes(sp=4, tp=2), "2048x1024"),
        ("FLUX.1-schnell", "v5e-4", MeshSizes(sp=2, tp=2), "512"),
        ("FLUX.1-schnell", "v6e-1", MeshSizes(), "1024"),
    ],
    ids=str,
)
def test_other_layouts(name: str, tpu: str, sizes: MeshSizes, size: str) -> None:
    check(name, tpu, sizes, size)
