"""What a slice of TPUs would do with Z-Image and Qwen-Image, counted in their programs; the formulas say the same."""

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import rank_layouts
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import parse_size
from tests.auto_layouts import as_text
from tests.families.test_flux_plan import check


@pytest.mark.default_cases("Z-Image-Turbo-4096-512-1-32-6150000000.0")
@pytest.mark.parametrize(
    ("name", "tokens", "text", "batch", "layers", "parameters"),
    [
        # 30 blocks and two that refine the image; the two that refine the prompt run once for all steps.
        ("Z-Image-Turbo", 4096, 512, 1, 32, 6.15e9),
        pytest.param("Z-Image", 4096, 512, 2, 32, 6.15e9, marks=pytest.mark.slow),
        pytest.param("Qwen-Image", 4096, 512, 2, 60, 20.4e9, marks=pytest.mark.slow),
        # One image of a million pixels, of which the text encoder of Edit sees 37 × 37 tokens, that of Plus 14 × 14.
        ("Qwen-Image-Edit", 8192, 1888, 2, 60, 20.4e9),
        pytest.param("Qwen-Image-Edit-2511", 8192, 736, 2, 60, 20.4e9, marks=pytest.mark.slow),
    ],
)
def test_sizes(name: str, tokens: int, text: int, batch: int, layers: int, parameters: float) -> None:
    model = find_model(name)
    work = model.workload(parse_size("1024", model))
    assert (work.tokens, work.text_tokens, work.batch, work.layers) == (tokens, text, batch, layers)
    weights = sum(times * matrix.nbytes / matrix.itemsize for times, matrix in work.matrices)
    assert weights == pytest.approx(parameters, rel=0.01)


@pytest.mark.default_cases("Qwen-Image-v6e-8-dp=2,tp=4", "Z-Image-Turbo-v6e-8-sp=4,tp=2")
@pytest.mark.parametrize(
    ("name", "tpu", "taken"),
    [
        ("Z-Image-Turbo", "v6e-8", "sp=4,tp=2"),
        ("Z-Image", "v5p-8", "dp=2,tp=2"),  # four chips
        ("Qwen-Image", "v6e-8", "dp=2,tp=4"),
        ("Qwen-Image-Edit-2511", "v5p-8", "dp=2,tp=2"),
    ],
)
def test_the_best_layout(name: str, tpu: str, taken: str) -> None:
    model = find_model(name)
    best = rank_layouts(model.workload(parse_size("1024", model)), parse_slice(tpu))[0]
    assert best.fits
    assert as_text(best.sizes) == taken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tpu", "sizes"),
    [
        ("Z-Image-Turbo", "v6e-8", MeshSizes(sp=4, tp=2)),
        ("Z-Image", "v6e-8", MeshSizes(dp=2, sp=2, tp=2)),
        ("Qwen-Image", "v6e-8", MeshSizes(dp=2, tp=4)),
        ("Qwen-Image", "v6e-8", MeshSizes(dp=2, sp=4)),
        ("Qwen-Image-Edit", "v5p-8", MeshSizes(dp=2, tp=2)),
        ("Qwen-Image-Edit-2511", "v6e-8", MeshSizes(dp=2, tp=4)),
    ],
    ids=str,
)
def test_the_formulas_are_those_of_the_program(name: str, tpu: str, sizes: MeshSizes) -> None:
    check(name, tpu, sizes, "1024")
