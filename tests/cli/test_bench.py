"""The command as a user runs it. Its processes are real ones where the test is slow: each imports torch, jax and
diffusers, which is ten seconds of a core."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_tpu.bench import runner
from comfy_tpu.bench.job import DEVICES, PARTS, Job
from comfy_tpu.bench.results import Row
from comfy_tpu.cli.bench import add_arguments
from comfy_tpu.cli.main import main
from comfy_tpu.compiler.cache import enable_cache
from comfy_tpu.config import CacheConfig
from comfy_tpu.errors import rename_as_flag
from tests.bench.test_results import make_run

ROOT = Path(__file__).parents[2]


def bench(*arguments):
    # Not what conftest.py set for the tests' own programs: eight devices, unoptimised.
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
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
        (["--peers", "jit"], "--peers names 'jit'; choose from ours, fp8, fast, eager, compile"),
        (["--peers", ""], "--peers is empty; choose from ours, fp8, fast, eager, compile"),
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
        (["--plot", "x.png"], "--plot x.png is written as SVG"),
        (["report", "gone.json", "--output", "x.md"], "gone.json is not a file of benchmark results"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, message, capsys):
    assert main(["bench", *arguments]) == 1
    assert f"comfy-tpu: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "small:nobody"], "--model small:nobody names no family; choose from wan, flux"),
        (
            ["--size", "large"],
            "--size large is no size; write width×height×frames as 1280x720x81, or one of 480P",
        ),
        (["--size", "830x480x81"], "--size 830x480x81: width=830 is not divisible by 16; use 816 or 832"),
        (["--mesh", "sp=64"], "--mesh dp=1,sp=64,tp=1 needs 64 devices but there are 8; choose sizes whose product"),
        (["--mesh", "tp=8", "--model", "Wan2.1-T2V-1.3B-Diffusers"], "heads=12"),
    ],
)
def test_a_choice_that_the_model_or_the_machine_refuses_is_one_sentence(arguments, message):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(arguments)
    model = "small" if given.model == "auto" else given.model
    emitted = []
    runner.run_part(
        Job(model=model, dtype="float32", mesh=given.mesh, sizes=tuple(given.size), parts=("compile",)), emitted.append
    )
    (answer,) = emitted
    refusal = rename_as_flag(answer["refused"], answer["field"], f"--{answer['field']}")
    assert message in refusal
    assert "\n" not in refusal


def receive_here(job, parts):
    """In place of a process."""
    emitted = []
    runner.run_part(job, emitted.append, parts)
    enable_cache(CacheConfig())  # the part's own directory is removed after it
    return emitted


def test_small_run(tmp_path, monkeypatch, capsys):
    """On a mesh, with errors: ours computes what diffusers does."""
    monkeypatch.setattr(runner, "_receive", receive_here)
    files = {name: tmp_path / f"x.{name}" for name in ("json", "md", "svg")}
    chosen = "--what accuracy --model small:flux --mesh dp=2,sp=2,tp=2 --repeats 2"
    outputs = ("--json", files["json"], "--markdown", files["md"], "--plot", files["svg"])
    assert main(["bench", *chosen.split(), *map(str, outputs)]) == 0
    printed = capsys.readouterr().out
    (run,) = json.loads(files["json"].read_text())["runs"]
    assert (run["model"], run["dtype"], run["hardware"]["platform"]) == ("small:flux", "float32", "cpu")
    assert (run["mesh"], run["command"]) == ("dp=2,sp=2,tp=2", f"comfy-tpu bench {chosen}")
    assert not [row["failure"] for row in run["rows"] if row["failure"]]
    rows = {row["peer"]: row for row in run["rows"]}
    assert rows["eager"]["error"] == 0
    assert 0 < rows["ours"]["error"] < 5e-5
    facts = rows["ours"]["facts"]
    assert (facts["mesh"], facts["batch"]) == ("dp=2,sp=2,tp=2", 2)
    assert facts["trace_s"] > 0
    assert facts["compile_s"] > 0
    assert facts["from_cache"] is False, "the cache is a fresh one"
    assert "### Error of two blocks of the transformer against float32" in printed
    assert files["md"].read_text().strip() == printed.strip()

    page = tmp_path / "page.md"
    assert main(["bench", "report", str(files["json"]), "--output", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(page)


@pytest.mark.slow
def test_times_of_a_small_run(tmp_path):
    results = tmp_path / "x.json"
    done = bench("--what", "transformer", "--repeats", 2, "--dtype", "bfloat16", "--json", results)
    (run,) = json.loads(results.read_text())["runs"]
    assert (run["model"], run["dtype"]) == ("small:wan", "bfloat16")
    rows = {(row["part"], row["peer"]): row for row in run["rows"]}
    for peer in ("ours", "eager"):
        assert len(rows["transformer", peer]["samples"]) == 2
    assert {row["what"].split()[0] for row in run["rows"] if row["part"] == "ceilings"} == {"matmul", "attention"}
    assert "### Transformer, one forward" in done.stdout


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
    monkeypatch.setattr(runner, "begin_run", lambda job, command, say: (make_run(), ["832x480x81"]))
    monkeypatch.setattr(runner, "measure_rows", lambda job, say: [Row(job.part, "forward", "fp8", samples=(1.0,))])
    said = []
    run = runner.run_bench(Job(parts=("accuracy", "text"), peers=("fp8",)), say=said.append, keep=lambda run: None)
    assert {row.part for row in run.rows} == {"accuracy"}
    assert said[said.index("— text 832x480x81") + 1] == "  not measured: it has none of the chosen peers (fp8)"


def spawn(function, part="vae", **options):
    said = []
    job = Job(part, size="96x64x9", **options)
    return [*runner.measure_rows(job, said.append, {part: ("tests.bench.spawned_part", function)})], said


def test_a_part_has_a_process_and_an_environment_of_its_own(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it, where a test needs its compiler
    cache = str(tmp_path / "vae")
    (row,), said = spawn("measure", cache_directory=cache)
    assert said == ["  a remark"]
    assert row.facts["process"] != os.getpid()
    assert row.facts["imported"] == [], "XLA reads its flags when jax is imported"
    assert row.facts["environment"]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert row.facts["environment"]["TORCHINDUCTOR_CACHE_DIR"] == f"{cache}-inductor"
    assert capfd.readouterr().out == "", "only tables are printed there"
    (row,), _ = spawn("measure", DEVICES)
    assert row.facts["environment"]["XLA_FLAGS"].endswith("--xla_force_host_platform_device_count=8")


def test_a_process_that_dies_is_a_row():
    (row,), _ = spawn("end")
    assert row == Row(
        "vae",
        "the part itself",
        "",
        size="96x64x9",
        failure="its process was ended by SIGKILL; for SIGKILL look at the host's memory",
    )


def test_a_machine_whose_devices_do_not_start(monkeypatch):
    monkeypatch.setattr(runner, "_receive", lambda job, parts: [Row("machine", "the part itself", "", failure="why")])
    with pytest.raises(runner.BenchError, match=r"could not be started \(why\); run `comfy-tpu doctor`"):
        runner.begin_run(Job(), "x", print)


def test_a_part_that_fails_as_a_whole_is_a_row(tmp_path):
    emitted = []
    runner.run_part(Job("vae", model="unknown", size="96x64x9", cache_directory=str(tmp_path)), emitted.append)
    (row,) = emitted
    assert row.failure.startswith("InvalidValueError: model=unknown is unknown; choose small, small:FAMILY, demo")
    assert row.part == "vae"
    assert "Traceback" in row.traceback
