"""comfy-tpu cache and comfy-tpu warm."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.stored import ProgramStore
from tests.cli.test_same_bytes import ROOT

SMALL = ("--height", "16", "--width", "16", "--num-frames", "5", "--steps", "3", "--mesh", "single")
WINDOWS = ("--num-frames", "13", "--context", "static", "--context-frames", "9", "--context-overlap", "1")

# A whole command, and what JAX traced, lowered and compiled meanwhile.
COUNTED = """
import json, sys
import jax.monitoring
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name.rpartition("/")[2]))
from comfy_tpu.cli.main import main
status = main(sys.argv[1:])
work = [name for name in events if name.endswith(("trace_duration", "module_duration", "compile_duration"))]
heavy = [name for name in ("diffusers", "transformers", "scipy", "torch._dynamo") if name in sys.modules]
print(json.dumps({"status": status, "work": work, "heavy": heavy}))
"""


NEW, OLD = f"jit_new-{'1' * 64}-cache", f"jit_old-{'2' * 64}-cache"
OTHERS = {"notes.txt", "family-cache", "diary.entry", "programs/diary.entry", "letters/a.entry", ".partial-download"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    (directory / "programs").mkdir(parents=True)
    for age, name in enumerate((NEW, OLD, f"programs/schedule-{'3' * 40}.entry")):
        (directory / name).write_bytes(bytes(1000))
        os.utime(directory / name, (time.time() - 86400 * age,) * 2)
    for name in OTHERS:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("mine")
    return directory


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main(["cache", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_size(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFY_TPU_CACHE_LIMIT", "2MB")
    found = report(capsys, "--cache-dir", str(cache))
    assert found == {"directory": str(cache), "limit_bytes": 2_000_000, "files": 3, "bytes": 3000}
    assert cli.main(["cache", "size", "--cache-dir", str(cache)]) == 0
    assert capsys.readouterr().out == f"{cache}: 3 files, 3 kB of at most 2 MB\n"


def test_a_size_beyond_the_limit_is_not_called_at_most(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMFY_TPU_CACHE_LIMIT", "2KB")
    assert cli.main(["cache", "size", "--cache-dir", str(cache)]) == 0
    assert capsys.readouterr().out == (
        f"{cache}: 3 files, 3 kB, and the limit is 2 kB: the least recently used go when a model is opened\n"
    )
    assert (cache / OLD).is_file()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert cli.main(["cache", "size", "--cache-dir", str(cache)]) == 0
    assert capsys.readouterr().out.endswith("go when a model is opened by somebody who may write there\n")


def test_clear_leaves_files_of_others(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "clear", "--cache-dir", str(cache))
    assert (found["removed"], found["files"]) == (3, 0)
    assert {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()} == OTHERS
    assert report(capsys, "clear", "--cache-dir", str(cache))["removed"] == 0


def test_clear_what_is_old(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "clear", "--older-than", "0.5", "--cache-dir", str(cache))["removed"] == 2
    assert (cache / NEW).is_file()


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "list", "--cache-dir", str(tmp_path / "none"))["programs"] == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["empty"], "ACTION empty is unknown; choose from size, list, clear"),
        (["size", "--older-than", "3"], "--older-than is for clear; leave it out"),
        (["clear", "--older-than", "-1"], "--older-than -1.0 is no number of days; give 0 or more"),
        (["clear", "--older-than", "nan"], "--older-than nan is no number of days"),
        (["clear", "--older-than", "soon"], "--older-than soon is no number of days"),
        (["clear", "--cache-dir", ""], "--cache-dir"),
    ],
)
def test_bad_input(arguments: list[str], text: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_directory = arguments if "--cache-dir" in arguments else [*arguments, "--cache-dir", str(cache)]
    try:
        assert cli.main(["cache", *with_directory]) == 1
    except SystemExit as error:
        assert error.code == 2  # noqa: PT017 - of the parser
    assert text in capsys.readouterr().err
    assert (cache / OLD).is_file()


def run(*arguments: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COMFY_TPU_PROGRAM_STORE": "1"}
    command = [sys.executable, "-c", COUNTED, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_after_warm_traces_compiles_and_imports_nothing_for_it(tmp_path: Path) -> None:
    """In the cache of all tests, where another run may have been before."""
    run("warm", "demo", *SMALL)
    prompt, outputs = ["generate", "a red circle moving left", *SMALL, "--output"], ("stored.npy", "traced.npy")
    stored, traced = (str(tmp_path / name) for name in outputs)
    assert run(*prompt, stored) == {"status": 0, "work": [], "heavy": []}
    assert cli.main([*prompt, traced]) == 0
    assert Path(stored).read_bytes() == Path(traced).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "arguments",
    [
        ("demo-image", *SMALL),
        ("demo", *SMALL, "--guidance-until", "0.5", "--num-videos", "2"),
        ("demo", *SMALL[:-2], "--mesh", "dp=2,sp=4"),
        ("demo", *SMALL, "--reuse", "0.3"),
        ("demo", *SMALL, "--fast"),
        ("demo", *SMALL, *WINDOWS, "--context-keyframes", "0.5"),
    ],
    ids=["image", "two videos, half guided", "mesh", "reuse", "fast", "keyframes"],
)
def test_warm_compiles_all_that_a_request_needs(arguments: tuple[str, ...], tmp_path: Path) -> None:
    model, *settings = arguments
    cache = ("--cache-dir", str(tmp_path / "cache"))
    run("warm", model, *settings, *cache)
    if model == "demo-image":
        from PIL import Image

        Image.new("RGB", (16, 16), "red").save(tmp_path / "first.png")
        settings += ["--image", str(tmp_path / "first.png")]
    found = run("generate", "a star", "--model", model, *settings, *cache, "--output", str(tmp_path / "x.npy"))
    assert found["work"] == []


def test_warm_that_keeps_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("comfy_tpu.pipeline.warming.warm_request", lambda *_: None)  # what it compiles is not kept
    (tmp_path / "file").touch()
    for directory in ("empty", "file"):
        assert cli.main(["warm", "demo", "--cache-dir", str(tmp_path / directory)]) == 1
        assert f"none is kept: {tmp_path / directory} cannot be written, or its limit" in capsys.readouterr().err


def test_warm_that_keeps_a_part_says_how_much_and_fails(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMFY_TPU_PROGRAM_STORE", "1")
    monkeypatch.setattr("comfy_tpu.pipeline.warming.warm_request", lambda *_: None)
    assert cli.main(["warm", "demo", "--cache-dir", str(cache)]) == 0
    monkeypatch.setattr(ProgramStore, "count_programs", lambda self: (9, 4))
    capsys.readouterr()
    assert cli.main(["warm", "demo", "--cache-dir", str(cache)]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert f"4 of 9 programs, with those that load weights, are kept: {cache} cannot be written" in error


def test_warm_checks_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warm", "no-such-model"]) == 1
    assert "no-such-model" in capsys.readouterr().err
    assert cli.main(["warm", "demo", "--height", "17"]) == 1
    assert "--height 17 is not divisible" in capsys.readouterr().err
