"""The command as a user runs it: in processes of its own, on the small model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_tpu.bench import runner
from comfy_tpu.bench.job import PARTS, Job
from comfy_tpu.bench.results import Row
from comfy_tpu.cli.main import main

ROOT = Path(__file__).parents[2]


def bench(*arguments):
    # Not what conftest.py set for the tests' own programs: eight devices, unoptimised.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "comfy_tpu.cli", "bench", *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what", "transformer,speed"], "--what names 'speed'; choose from transformer, accuracy, vae"),
        (["--what", ","], "--what is empty; choose from"),
        (["--peers", "jit"], "--peers names 'jit'; choose from ours, fp8, eager, compile"),
        (["--peers", ""], "--peers is empty; choose from ours, fp8, eager, compile"),
        (["--what", ""], "--what is empty; choose from"),
        (
            ["--what", "text", "--peers", "fp8"],
            "--peers fp8: nothing would be measured in text; choose from ours, eager",
        ),
        (["--repeats", "0"], "--repeats 0 is not allowed; give a whole number from 1"),
        (["--repeats", "many"], "--repeats 'many' is not allowed; give a whole number from 1"),
        (["--steps", "-3"], "--steps -3 is not allowed; give a whole number from 1"),
        (["--json", "no/such/x.json"], "--json no/such/x.json is in no/such, and there is no no; create it first"),
        (["--markdown", "."], "--markdown . is a directory, expected a file; add a file name"),
        (["--plot", "no/such/x.svg"], "--plot no/such/x.svg is in no/such"),
        (["--size", "480p"], "--size 480p is not of the form WIDTHxHEIGHTxFRAMES"),
        (["--plot", "x.png"], "--plot x.png is written as SVG"),
        (["vae", "--variants", "jit"], "--variants names 'jit'; choose from torchax-unrolled, torchax-scanned"),
        (["vae", "--frames", "80"], "--frames 80 is not 4n+1; try 81"),
        (["vae", "--height", "40"], "--height 40 is not a multiple of 16; try 48"),
        (["vae", "--width", "wide"], "--width wide is not a multiple of 16; try 64"),
        (["vae", "--repeats", "0"], "--repeats 0 is not allowed; give a whole number from 1"),
        (["vae", "--output", "x.txt"], "--output x.txt is Markdown; give it a name in .md"),
        (["report", "gone.json", "--output", "x.md"], "gone.json is not a file of benchmark results"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, message, capsys):
    assert main(["bench", *arguments]) == 1
    assert f"comfy-tpu: {message}" in capsys.readouterr().err


def test_small_run(tmp_path):
    files = {name: tmp_path / f"x.{name}" for name in ("json", "md", "svg")}
    done = bench(
        *("--what", "transformer", "--repeats", 2, "--dtype", "bfloat16"),
        *("--json", files["json"], "--markdown", files["md"], "--plot", files["svg"]),
    )
    (run,) = json.loads(files["json"].read_text())["runs"]
    assert (run["model"], run["dtype"], run["hardware"]["platform"]) == ("small", "bfloat16", "cpu")
    assert {"torch", "jax", "diffusers", "python"} <= {name for name, version in run["versions"].items() if version}
    rows = {(row["part"], row["peer"]): row for row in run["rows"]}
    assert not [row["failure"] for row in run["rows"] if row["failure"]]
    for peer in ("ours", "eager"):
        assert len(rows["transformer", peer]["samples"]) == 2
    facts = rows["transformer", "ours"]["facts"]
    assert facts["trace_s"] > 0
    assert facts["compile_s"] > 0
    assert facts["from_cache"] is False, "the cache is a fresh one"
    assert {row["what"].split()[0] for row in run["rows"] if row["part"] == "ceilings"} == {"matmul", "attention"}
    assert "### Transformer, one forward" in done.stdout
    assert files["md"].read_text().strip() == done.stdout.strip()

    page = tmp_path / "page.md"
    done = bench("report", files["json"], "--output", page)
    assert done.stdout.splitlines()[0] == str(page)


@pytest.mark.slow
def test_vae_run(tmp_path):
    files = [tmp_path / name for name in ("x.json", "x.md")]
    variants = ["torchax-scanned", "nnx-frames", "eager"]
    size = ("--frames", 9, "--height", 16, "--width", 16)
    chosen = ("--variants", ",".join(variants), "--repeats", 1)
    done = bench("vae", *size, *chosen, "--json", files[0], "--output", files[1])
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
    assert "| NNX frame by frame |" in done.stdout
    assert (tmp_path / "x-decode.svg").is_file()


@pytest.mark.slow
def test_errors_of_a_small_run(tmp_path):
    results = tmp_path / "x.json"
    bench("--what", "accuracy,text", "--repeats", 1, "--dtype", "bfloat16", "--json", results)
    (run,) = json.loads(results.read_text())["runs"]
    rows = {(row["part"], row["peer"]): row for row in run["rows"]}
    for peer in ("ours", "eager"):
        assert 0 < rows["accuracy", peer]["error"] < 2e-2
        assert rows["text", peer]["error"] < 5e-2


@pytest.mark.slow
def test_every_part_of_a_small_run(tmp_path):
    results = tmp_path / "x.json"
    bench("--repeats", 1, "--steps", 1, "--json", results)
    (run,) = json.loads(results.read_text())["runs"]
    assert not [row["failure"] for row in run["rows"] if row["failure"]]
    assert {row["part"] for row in run["rows"]} == {*PARTS, "ceilings"}
    rows = {row["what"]: row for row in run["rows"] if row["part"] in ("compile", "scaling")}
    assert rows["vae decode, cold"]["facts"]["from_cache"] is False
    assert rows["vae decode, warm"]["facts"]["from_cache"] is True, "a new process compiles nothing"
    counted = [
        rows[f"small model on {count} virtual CPU devices"]["facts"]["flops_per_device"] for count in (1, 2, 4, 8)
    ]
    assert counted[0] > 1.8 * counted[1] > 3.2 * counted[2] > 5.6 * counted[3]


def test_a_part_without_any_of_the_chosen_peers_says_so(monkeypatch):
    from comfy_tpu.bench.job import Choices
    from tests.bench.test_results import make_run

    monkeypatch.setattr(runner, "begin_run", lambda choices, say: make_run())
    monkeypatch.setattr(
        runner, "measured_rows", lambda job, scratch, say: [Row(job.part, "forward", "fp8", samples=(1.0,))]
    )
    said = []
    run = runner.run_bench(Choices(parts=("accuracy", "text"), peers=("fp8",)), say=said.append, keep=lambda run: None)
    assert {row.part for row in run.rows} == {"accuracy"}
    assert said[said.index("— text 832x480x81") + 1] == "  not measured: it has none of the chosen peers (fp8)"


def test_a_process_that_dies_is_a_row(monkeypatch, tmp_path):
    package = tmp_path / "comfy_tpu"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(runner, "_environment", lambda job, scratch: {"PYTHONPATH": str(tmp_path)})
    (row,) = runner.measured_rows(Job("vae", size="96x64x9"), tmp_path, lambda text: None)
    assert row == Row(
        "vae", "the part itself", "", size="96x64x9", failure="its process exited with status 1; its messages are above"
    )


def test_a_part_that_fails_as_a_whole_is_a_row(tmp_path):
    from comfy_tpu.bench.worker import Messages, work

    with (tmp_path / "out").open("w+") as out:
        work(Job("vae", model="unknown", size="96x64x9", cache_directory=str(tmp_path)), Messages(out))
        out.seek(0)
        row = json.loads(out.read())["row"]
    assert row["failure"] == "KeyError: 'unknown'"
    assert row["part"] == "vae"
    assert "Traceback" in row["traceback"]
