"""Every flag of every command, taken from the parsers themselves, with values that are wrong, odd or too large."""

from __future__ import annotations

import argparse
import functools
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from comfy_tpu.cli import main as cli
from comfy_tpu.cli.main import COMMANDS
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.pipeline import artifacts, media, video
from tests.cli.fake_pipeline import MODELS, FakePipeline
from tests.fuzz.cases import LONG, _limit_time, run_settings, watch_writes
from tests.fuzz.hostile_bytes import FLOATS, NUMBERS, TEXTS, dump, small_texts
from tests.fuzz.job_readers import LINE, WORKFLOW

BOUNDED = 6
"""Cases of each command in the default run."""
STATUSES = (0, 1, 2)
SINKS = {
    "batch": ("comfy_tpu.cli.batch._open_workers",),
    "serve": ("comfy_tpu.cli.serve.open_socket", "comfy_tpu.cli.serve._open_service", "comfy_tpu.cli.serve._serve"),
    "models": ("comfy_tpu.cli.models._find_fits",),
    "download": ("comfy_tpu.cli.download.download_model",),
    "warm": ("comfy_tpu.pipeline.warming.warm_request",),
    "bench": ("comfy_tpu.bench.runner.run_bench",),
    "plan": ("comfy_tpu.planning.plan.make_plan", "comfy_tpu.planning.plan.plan_program"),
    "port": (
        *("comfy_tpu.porting.check.check", "comfy_tpu.porting.check.list_operators", "comfy_tpu.porting.bisect.bisect"),
        "comfy_tpu.porting.scaffold.new.make_scaffold",
    ),
    "comfyui": ("os.execv", "comfy_tpu.comfyui_api.run.run_workflow"),
    "install": ("comfy_tpu.cli.install.install_pack", "comfy_tpu.cli.install.remove_pack"),
    "doctor": ("comfy_tpu.cli.doctor.examine",),
}
"""What a command begins once its flags are checked: minutes of work, other machines, other programs."""


class ReachedError(ComfyTpuError):
    """A command took its flags."""


def _stop(*_: Any, **__: Any) -> Any:
    raise ReachedError("the flags were taken")


@functools.cache
def command_parsers() -> dict[str, tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The words and the parser of each command, and of commands inside them, by name."""
    found = {}
    for command in COMMANDS:
        (action,) = (
            each for each in cli._parser([command.name])._actions if isinstance(each, argparse._SubParsersAction)
        )
        found |= dict(_walk((command.name,), action.choices[command.name]))
    return found


def _walk(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    yield " ".join(words), (words, parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inside in action.choices.items():
                yield from _walk((*words, name), inside)


FILES = (
    *("good.png", "clip", "lora.safetensors", "jobs.jsonl", "workflow.json", "empty", "text.safetensors"),
    *("out.mp4", "out.png", "out.gif", "out", "frames/", "missing/out.mp4", "x.safetensors", "latents.safetensors"),
)
GOOD = (
    "demo",
    "other",
    "auto",
    "none",
    "1",
    "2",
    "9",
    "32",
    "64",
    "0.5",
    "1.0",
    "dp=2",
    "480P",
    "v6e-8",
    "cpu",
    "euler",
)
# Without roots: a path that the user chose may be written.
WORDS = tuple(text for text in TEXTS if not text.startswith(("/", "~")) and "\0" not in text)


def _values(action: argparse.Action) -> st.SearchStrategy[str]:
    choices = [str(choice) for choice in action.choices or ()]
    numbers = [str(number) for number in (*NUMBERS, *FLOATS)]
    common = st.one_of(
        st.sampled_from(GOOD), st.sampled_from(FILES), st.sampled_from(numbers), st.sampled_from(WORDS), small_texts
    ).filter(lambda text: "\0" not in text and not text.startswith(("/", "~")))
    return st.one_of(common, st.sampled_from(choices)) if choices else common


@st.composite
def command_lines(draw: st.DrawFn, words: tuple[str, ...], parser: argparse.ArgumentParser) -> list[str]:
    line = list(words)
    flags = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    positional = [
        action
        for action in parser._actions
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
    ]
    chosen = draw(st.lists(st.sampled_from(flags), max_size=4)) if flags else []
    if "-o" in parser._option_string_actions and draw(st.integers(0, 3)):
        chosen.append(parser._option_string_actions["-o"])
    for action in chosen:
        flag = draw(st.sampled_from(action.option_strings))
        if action.nargs == 0:
            line.append(flag)
        else:
            line += [flag, draw(_values(action))] if draw(st.booleans()) else [f"{flag}={draw(_values(action))}"]
    for action in positional:
        if draw(st.integers(0, 9)):
            line.insert(len(words), draw(_values(action)))
    return line


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory three levels down, with files that flags may name, and without what a command would begin."""
    top = tmp_path_factory.mktemp("flags")
    place = top / "a" / "b" / "c"
    place.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(place / "good.png")
    (place / "clip").mkdir()
    Image.new("RGB", (8, 8)).save(place / "clip" / "frame_0001.png")
    (place / "frames").mkdir()
    save_file({"blocks.0.attn1.to_q.lora_A.weight": torch.zeros(4, 256)}, place / "lora.safetensors")
    (place / "jobs.jsonl").write_bytes(dump(LINE) + b"\n")
    (place / "workflow.json").write_bytes(dump(WORKFLOW))
    (place / "empty").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(video, "VideoPipeline", FakePipeline)
        patch.setattr("comfy_tpu.cli.hosts.run_to_exit", lambda run: sys.exit("waiting for other hosts"))
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(top / "cache"))  # `cache clear` clears it
        patch.setenv("HF_HOME", str(top / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HOME", str(top / "home"))
        patch.delenv("COMFYUI_PATH", raising=False)
        pipeline = FakePipeline.open("demo")
        settings = pipeline.settings(guidance_scale=3.0)
        embeddings = pipeline.encode("a red circle", settings)
        artifacts.save_text(place / "text.safetensors", embeddings, settings, pipeline)
        latents = pipeline.denoise(embeddings, settings)
        artifacts.save_latents(place / "latents.safetensors", latents, "a red circle", settings, pipeline)
        yield place


def run_line(line: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(place)
    stdin = io.TextIOWrapper(io.BytesIO(b"a prompt"))
    with pytest.MonkeyPatch.context() as patch, _limit_time(), watch_writes(place.parents[2]):
        patch.setattr("sys.stdin", stdin)
        try:
            status = cli.main(line)
        except SystemExit as ended:  # of argparse
            if not isinstance(ended.code, int):
                sys.stderr.write(f"{ended.code}\n")
            status = ended.code if isinstance(ended.code, int) else 1
    out, error = capsys.readouterr()
    assert status in STATUSES, f"status {status}: {error}"
    assert "Traceback" not in out + error, error
    if status == 2 or (status == 1 and "--json" not in line):
        assert error.strip() or out.strip(), "failed without a word"
    if status == 0 and line[0] in ("generate", "decode") and "--json" not in line:
        check_outputs(out)
    assert not [path for path in place.rglob("*partial*") if path.is_file()], "a partial file was left"


def check_outputs(printed: str) -> None:
    for name in printed.splitlines():
        path = Path(name)
        if path.suffix in (".mp4", ".gif", ".png", ".webp") and "%" not in name:
            assert path.stat().st_size, f"{name} is empty"
            assert media.read_metadata(path).get("model") in MODELS


def fuzz(name: str, cases: int, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, parser = command_parsers()[name]

    @seed(2025)
    @run_settings(cases)
    @given(command_lines(words, parser))
    def run(line: list[str]) -> None:
        run_line(line, place, capsys)

    with pytest.MonkeyPatch.context() as patch:
        for sink in SINKS.get(words[0], ()):
            patch.setattr(sink, _stop)
        run()


@pytest.mark.parametrize("name", sorted(command_parsers()))
def test_flags(name: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(name, BOUNDED, workplace, capsys)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", sorted(command_parsers()))
def test_many_flags(name: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz(name, LONG // 10, workplace, capsys)
