"""What the command says of typical mistakes."""

import errno
import io
import json
import logging
import sys
from pathlib import Path

import pytest

from comfy_tpu.cli import main as cli
from comfy_tpu.cli.options import argument_names
from comfy_tpu.pipeline import media, video
from tests.cli.fake_pipeline import FakePipeline

LONG = "circle red " * 36_364
"""400,000 characters."""


@pytest.fixture
def directory(monkeypatch, tmp_path):
    """The current one, with the fake pipeline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(video, "VideoPipeline", FakePipeline)
    return tmp_path


EMPTY = {
    "generate": (["generate", "x", "-o", ""], "--output"),
    "sheet": (["generate", "x", "--contact-sheet", ""], "--contact-sheet"),
    "image": (["generate", "x", "--image", ""], "--image"),
    "last image": (["encode", "x", "--last-image", ""], "--last-image"),
    "lora": (["generate", "x", "--lora", ""], "--lora"),
    "cache": (["generate", "x", "--cache-dir", ""], "--cache-dir"),
    "profile": (["generate", "x", "--profile", ""], "--profile"),
    "dump": (["encode", "x", "--dump", ""], "--dump"),
    "encode": (["encode", "x", "-o", ""], "--output"),
    "denoise": (["denoise", ""], "TEXT"),
    "decode": (["decode", ""], "LATENTS"),
    "calibrate": (["calibrate", "demo", "-o", ""], "--output"),
    "export": (["plan", "demo", "--tpu", "v6e-8", "--export", ""], "--export"),
    "from": (["plan", "--from", ""], "--from"),
    "install": (["install", ""], "COMFYUI_DIR"),
    "workflow": (["comfyui", "run", ""], "WORKFLOW"),
    "measured": (["port", "check", "x.py", "--bench", ""], "--bench"),
    "bench": (["bench", "--json", ""], "--json"),
    "report": (["bench", "report", "", "-o", "x.md"], "FILE"),
}


@pytest.mark.parametrize(("argv", "name"), EMPTY.values(), ids=EMPTY)
def test_an_empty_path_is_not_the_current_directory(argv, name, directory, capsys):
    assert cli.main(argv) == 1
    assert capsys.readouterr() == ("", f"comfy-tpu: {name} is empty; give a path\n")
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(("argv", "name"), EMPTY.values(), ids=EMPTY)
def test_a_path_that_no_file_can_have(argv, name, directory, capsys):
    assert cli.main([argument or "x\ud800" for argument in argv]) == 1
    error = f"comfy-tpu: {name} 'x\\ud800' holds '\\ud800', which is half a character; give another path\n"
    assert capsys.readouterr() == ("", error)
    assert list(directory.iterdir()) == []


def test_a_prompt_that_is_cut_is_not_echoed_whole(directory, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LONG.encode()), "utf-8"))
    assert cli.main(["generate", "-", "-o", "x.mp4", "--json"]) == 0
    out, err = capsys.readouterr()
    begin = "comfy-tpu: warning: PROMPT is longer than the model reads; this was cut off: circle red circle"
    assert err.startswith(begin)
    assert err.endswith("… (399,959 characters)\n")
    assert len(err) < 400
    document = json.loads(out)  # data stays whole
    assert document["prompt"] == LONG.strip()
    assert document["prompt_cut"] == " ".join(LONG.split()[8:])
    assert media.read_metadata("x.mp4")["prompt"] == LONG.strip()


@pytest.mark.parametrize(
    ("flags", "begin", "cut", "end"),
    [
        (["--model", LONG], "--model circle red", f"({len(LONG):,} characters)", 'such as "owner/name", or "demo"\n'),
        (
            ["--scheduler", LONG],
            "--scheduler 'circle",
            "characters left out",
            "choose from unipc, euler, dpm++, euler-trailing\n",
        ),
        (["--size", LONG], "--size circle", "characters left out", "choose from 480P, 720P\n"),
    ],
)
def test_a_long_value_is_not_echoed_whole(flags, begin, cut, end, capsys):
    assert cli.main(["generate", "x", *flags]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"comfy-tpu: {begin}")
    assert err.endswith(end)
    assert cut in err
    assert len(err) < 2000


def test_warnings_name_flags_as_errors_do(directory, capsys, monkeypatch):
    logger = logging.getLogger("comfy_tpu.pipeline.checks")
    message, field = "guidance_scale=3.0 has no effect: Fake was distilled", {"field": "guidance_scale"}
    monkeypatch.setattr(FakePipeline, "_begin", lambda *arguments: logger.warning(message, extra=field))
    assert cli.main(["encode", "x"]) == 0
    assert capsys.readouterr().err == "comfy-tpu: --guidance-scale 3.0 has no effect: Fake was distilled\n"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["plan", "", "--tpu", "v6e-8"], "MODEL is empty; give a directory"),
        (["plan", "--from", "none.zip"], "--from none.zip is not a file"),
        (["generate", "x", "--platform", "cuda"], "--platform 'cuda' is unknown; choose from auto, tpu, gpu, cpu"),
    ],
)
def test_an_error_names_the_argument_of_the_command(argv, text, capsys):
    assert cli.main(argv) == 1
    assert capsys.readouterr().err.startswith(f"comfy-tpu: {text}")


def test_names_of_arguments():
    parser = cli.Parser()
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-o", "--output")
    parser.add_argument("--steps", "--num-inference-steps", dest="num_inference_steps")
    parser.add_argument("--from", dest="from_")
    sub = parser.add_subparsers().add_parser("sub")
    sub.add_argument("--inputs")
    expected = {"model": "MODEL", "output": "--output", "num_inference_steps": "--steps", "from": "--from"}
    assert argument_names(parser) == expected | {"inputs": "--inputs", "help": "--help"}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["generate", "a", "red", "circle"], "red circle; put a PROMPT of several words in quotes"),
        (["generate", "x", "--num_frames", "5"], "--num_frames 5; did you mean --num-frames?"),
        (["generate", "x", "--sed", "1"], "--sed 1; did you mean --seed?"),
        (["denoise", "x", "y"], "y"),
        (["generate", "x", "--frobnicate"], "--frobnicate"),
    ],
)
def test_arguments_that_the_command_does_not_have(argv, text, capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    assert leaving.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: comfy-tpu {argv[0]}")
    assert err.endswith(f"comfy-tpu {argv[0]}: error: unrecognized arguments: {text}\n")


@pytest.mark.parametrize("flag", ["--lora", "--image"])
def test_a_name_that_no_file_can_have(flag, capsys):
    assert cli.main(["generate", "x", flag, "x" * 300]) == 1
    err = capsys.readouterr().err
    shown = f"{'x' * 200}… (300 characters)"
    assert err == f"comfy-tpu: {shown} cannot be opened (File name too long); give another path\n"


def test_a_path_that_may_not_be_looked_up(monkeypatch, capsys):
    def is_file(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", is_file)
    assert cli.main(["generate", "x", "--image", "secret/first.png"]) == 1
    err = capsys.readouterr().err
    assert err == "comfy-tpu: secret/first.png cannot be opened (Permission denied); give another path\n"
