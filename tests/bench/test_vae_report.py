"""The figures of the Wan VAE, written twice: in tables of two languages and in the page that keeps them."""

import dataclasses
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.vae import __main__ as command
from benchmarks.vae import pages
from benchmarks.vae import report as vae_report
from benchmarks.vae.choices import START, TURNS, VARIANTS, VaeChoices
from benchmarks.vae.runner import _jobs
from comfy_tpu.bench.results import Row
from tests.bench.test_report import PLOTTED, narrow
from tests.bench.test_results import make_run
from tests.pins import only_with_the_pinned

ROOT = Path(__file__).parents[2]
FACTS = {"import_s": 2.0, "total_s": 9.0, "programs": 2, "hlo_instructions": 1234, "hlo_bytes": 2**20}
RUN = make_run(
    Row(START, "cold", "nnx-frames", size="64x48x81", first_s=4.0, error=1e-6, facts=FACTS),
    Row(START, "cold", "torchax-scanned", size="64x48x81", first_s=5.0, error=2e-6, facts=FACTS),
    Row(TURNS, "decode", "nnx-frames", size="64x48x81", samples=(1.0, 1.2, 1.1)),
    Row(TURNS, "decode", "compile", size="64x48x81", failure="no compiler"),
)


def test_tables_in_two_languages():
    english, chinese = (narrow(vae_report.tables(RUN, language)) for language in ("en", "zh-CN"))
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
    assert VaeChoices().command == "python -m benchmarks.vae"
    choices = VaeChoices(height=720, width=1280, variants=("eager",), full_size=True, repeats=3)
    options = "--height 720 --width 1280 --repeats 3 --variants eager --full-size"
    assert choices.command == f"python -m benchmarks.vae {options}"
    assert str(choices.size) == "1280x720x81"
    assert set(VARIANTS) >= {"torchax-unrolled", "nnx-unrolled"}


@only_with_the_pinned(PLOTTED)
def test_the_pages_show_what_the_results_make():
    for path, text in pages.texts().items():
        assert path.is_file(), f"{path.name} is missing; run `make torchax-vs-flax`"
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale; run `make torchax-vs-flax`"


def test_a_page_without_its_place_for_figures():
    with pytest.raises(SystemExit, match=r"has no line .*put one where the tables belong"):
        pages.with_figures("# A page", "| a |", Path("x.md"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "jit"], "--variants names 'jit'; choose from torchax-unrolled, torchax-scanned"),
        (["--frames", "80"], "--frames 80 is not 4n+1; try 81"),
        (["--height", "40"], "--height 40 is not a multiple of 16; try 48"),
        (["--width", "wide"], "--width wide is not a multiple of 16; try 64"),
        (["--repeats", "0"], "--repeats 0 is not allowed; give a whole number from 1"),
        (["--output", "x.txt"], "--output x.txt is Markdown; give it a name in .md"),
    ],
)
def test_wrong_choices_are_refused_before_anything_starts(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks.vae", *arguments])
    assert command.main() == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_the_study(tmp_path):
    files = [tmp_path / name for name in ("x.json", "x.md")]
    variants = ["torchax-scanned", "nnx-frames", "eager"]
    size = ("--frames", 9, "--height", 16, "--width", 16)
    chosen = ("--variants", ",".join(variants), "--repeats", 1)
    arguments = [*size, *chosen, "--json", files[0], "--output", files[1]]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    line = [sys.executable, "-m", "benchmarks.vae", *map(str, arguments)]
    done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(files[0].read_text())["runs"]
    assert not [row["failure"] for row in run["rows"] if row["failure"]]
    rows = {(row["part"], row["what"], row["peer"]): row for row in run["rows"]}
    assert len(rows) == 3 * len(variants), "cold, warm and by turns"
    for variant in variants[:2]:
        cold, warm = (rows["vae start", state, variant] for state in ("cold", "warm"))
        assert cold["error"] < 1e-4
        assert cold["facts"]["from_cache"] is False
        assert warm["facts"]["from_cache"] is True, "a new process compiles nothing"
        assert cold["facts"]["hlo_instructions"] > 1000
        assert cold["facts"]["peak_bytes"] > 2**28
    assert rows["vae start", "cold", "nnx-frames"]["facts"]["programs"] == 2
    assert "| NNX frame by frame |" in narrow(done.stdout)
    assert (tmp_path / "x-decode.svg").is_file()
