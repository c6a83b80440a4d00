"""What a slice of TPUs would do with Flux.2, counted in its program; the formulas say the same."""

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import rank_layouts
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import parse_size
from tests.families.test_flux_plan import check


@pytest.mark.default_cases("FLUX.2-dev-56-32200000000.0")
@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [("FLUX.2-dev", 56, 32.2e9), ("FLUX.2-klein-9B", 32, 9.08e9), ("FLUX.2-klein-4B", 25, 3.88e9)],
)
def test_sizes(name: str, layers: int, parameters: float) -> None:
    model = find_model(name)
    work = model.workload(parse_size("1024x1024x1", model))
    assert (work.tokens, work.sequence, work.batch, work.layers) == (4096, 4608, 1, layers)
    weights = sum(times * matrix.nbytes / matrix.itemsize for times, matrix in work.matrices)
    assert weights == pytest.approx(parameters, rel=0.005)


@pytest.mark.thorough  # by default: the sizes, above
def test_the_base_model_computes_two_branches() -> None:
    model = find_model("FLUX.2-klein-base-4B")
    assert model.workload(parse_size("1024", model)).batch == 2


@pytest.mark.slow
def test_dev_on_eight_chips() -> None:
    model, slice_ = find_model("FLUX.2-dev"), parse_slice("v6e-8")
    best = rank_layouts(model.workload(parse_size("1024", model)), slice_)[0]
    assert best.fits
    assert best.sizes.tp > 1, "gathering all weights for so few tokens would take most of the step"
    check("FLUX.2-dev", "v6e-8", best.sizes, "1024")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tpu", "sizes", "size"),
    [
        ("FLUX.2-dev", "v6e-8", MeshSizes(tp=8), "1024"),
        ("FLUX.2-klein-9B", "v6e-8", MeshSizes(sp=8), "1024"),
        ("FLUX.2-klein-base-4B", "v6e-8", MeshSizes(sp=2, tp=4), "1024"),
        ("FLUX.2-klein-4B", "v6e-1", MeshSizes(), "1024"),
    ],
    ids=str,
)
def test_other_layouts(name: str, tpu: str, sizes: MeshSizes, size: str) -> None:
    check(name, tpu, sizes, size)
