"""The figures of the Wan VAE, written twice: in tables of two languages and in the page that keeps them."""

import dataclasses
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from comfy_tpu.bench import vae_report
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.vae_choices import START, TURNS, VARIANTS, VaeChoices
from comfy_tpu.bench.vae_runner import _jobs
from tests.bench.test_results import make_run
from tools import torchax_vs_flax

ROOT = Path(__file__).parents[2]
FACTS = {"import_s": 2.0, "total_s": 9.0, "programs": 2, "hlo_instructions": 1234, "hlo_bytes": 2**20}
RUN = make_run(
    Row(START, "cold", "nnx-frames", size="64x48x81", first_s=4.0, error=1e-6, facts=FACTS),
    Row(START, "cold", "torchax-scanned", size="64x48x81", first_s=5.0, error=2e-6, facts=FACTS),
    Row(TURNS, "decode", "nnx-frames", size="64x48x81", samples=(1.0, 1.2, 1.1)),
    Row(TURNS, "decode", "compile", size="64x48x81", failure="no compiler"),
)


def test_tables_in_two_languages():
    english, chinese = (vae_report.tables(RUN, language) for language in ("en", "zh-CN"))
    assert "| NNX frame by frame | 1.10 s | 1.00 s – 1.20 s | 3 |" in english
    assert "| diffusers + torch.compile | no compiler |" in english
    assert english.index("| torchax scanned | 2.00 s | 9.00 s |") < english.index("| NNX frame by frame | 2.00 s")
    assert "| NNX frame by frame | 2 | 1,234 | 1.00 MiB | 1.0e-06 |" in english
    assert "warm" not in english, "what was not measured has no table"
    assert [line.count("|") for line in english.splitlines()] == [line.count("|") for line in chinese.splitlines()]
    assert "| 方式 | 中位数 |" in chinese


def test_plots_are_well_formed():
    drawn = vae_report.plots(RUN)
    assert list(drawn) == ["start", "decode"]
    for text in drawn.values():
        ET.fromstring(text)


def test_a_run_is_every_variant_twice_and_all_by_turns(tmp_path):
    run = dataclasses.replace(make_run(), model="narrow", dtype="float32")
    jobs = list(_jobs(VaeChoices(frames=9), run, ("nnx-scanned", "eager"), tmp_path))
    assert [(job.part, job.peers, job.state) for job in jobs[1:]] == [
        (START, ("nnx-scanned",), "cold"),
        (START, ("nnx-scanned",), "warm"),
        (START, ("eager",), "cold"),
        (START, ("eager",), "warm"),
        (TURNS, ("nnx-scanned", "eager"), "warm"),
    ]
    assert jobs[1].cache_directory == jobs[2].cache_directory != jobs[3].cache_directory
    assert {job.size for job in jobs} == {"64x48x9"}


def test_the_command_that_repeats_a_run():
    assert VaeChoices().command == "comfy-tpu bench vae"
    choices = VaeChoices(height=720, width=1280, variants=("eager",), full_size=True, repeats=3)
    assert choices.command == "comfy-tpu bench vae --height 720 --width 1280 --repeats 3 --variants eager --full-size"
    assert str(choices.size) == "1280x720x81"
    assert set(VARIANTS) >= {"torchax-unrolled", "nnx-unrolled"}


def test_the_pages_show_what_the_results_make():
    for path, text in torchax_vs_flax.texts().items():
        assert path.is_file(), f"{path.name} is missing; run `make torchax-vs-flax`"
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale; run `make torchax-vs-flax`"


def test_a_page_without_its_place_for_figures():
    with pytest.raises(SystemExit, match=r"has no line .*put one where the tables belong"):
        torchax_vs_flax.with_figures("# A page", "| a |", Path("x.md"))
