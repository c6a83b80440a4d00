"""Figures of other documents stand beside commands that this version takes."""

import shlex

import pytest

from comfy_tpu.bench.job import PARTS, Job
from comfy_tpu.bench.page_texts import LANGUAGES, read_texts
from comfy_tpu.bench.reported import format_figures, read_figures
from comfy_tpu.cli.main import _parse
from comfy_tpu.cli.options import parse_names
from comfy_tpu.families.registry import model_cards
from comfy_tpu.parallel.mesh import parse_mesh

SOURCES, FIGURES = read_figures()


@pytest.mark.parametrize(
    "figure", FIGURES, ids=lambda figure: f"{figure.what}-{figure.size}-{figure.mesh}-{figure.backend}"
)
def test_the_command_of_a_figure_is_one_that_bench_takes(figure):
    model = SOURCES[figure.source].model
    job = figure.job(model)
    program, *words = shlex.split(job.command)
    given = _parse(words)
    assert program == "comfy-tpu"
    assert (given.model, given.mesh, given.vae_backend) == (model, figure.mesh, figure.backend)
    assert parse_names(given.what, PARTS, "--what") == job.parts
    card = next(card for card in model_cards() if model in card.published)
    assert all(size in card.sizes for size in given.size)
    assert given.steps == 50 or "end-to-end" not in job.parts
    sizes = parse_mesh(figure.mesh, 8)
    assert sizes.device_count == 8
    assert card.published[model]["num_attention_heads"] % sizes.tp == 0
    assert figure.backend in card.vae_backends


@pytest.mark.parametrize("size", ["480P", "720P"])
def test_the_figures_of_a_size_add_up(size):
    """As in their document: a step times its steps is the later run, the stages are the total."""
    rows = {figure.what: figure for figure in FIGURES if figure.size == size}
    assert rows["transformer"].step_s * 50 == pytest.approx(rows["transformer"].later_s, rel=0.01)
    for column in ("first_s", "later_s"):
        stages = [getattr(rows[what], column) or 0 for what in ("text", "transformer", "vae")]
        assert sum(stages) == pytest.approx(getattr(rows["end-to-end"], column), rel=0.01)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_figure_is_on_the_page_beside_its_command(language):
    section = format_figures(read_texts(language).figures)
    lines = [line.split(" | ") for line in section.splitlines() if "comfy-tpu bench" in line]
    for figure, cells in zip(FIGURES, lines, strict=True):
        assert cells[2] == figure.mesh
        for value, cell in zip((figure.first_s, figure.later_s, figure.step_s), cells[4:7], strict=True):
            assert cell == ("" if value is None else f"{value:g} s")
        assert cells[7].removesuffix(" |").strip("`") == figure.job(SOURCES[figure.source].model).command


def test_another_backend_is_in_the_command_and_in_the_name_of_a_row():
    nnx = Job(parts=("vae",), vae_backend="nnx")
    assert nnx.command == "comfy-tpu bench --what vae --vae-backend nnx"
    assert nnx.name_with_backend("decode") == "decode, VAE by nnx"
    assert "vae-backend" not in Job().command
    assert Job().name_with_backend("decode") == "decode"
