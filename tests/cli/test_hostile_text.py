"""Text that comes from files and arguments reaches a terminal without its control characters."""

import io
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from comfy_tpu.cli import main as cli
from comfy_tpu.cli import terminal
from comfy_tpu.cli.findings import finding_lines, printable
from comfy_tpu.cli.progress import Display
from comfy_tpu.config import GenerationSettings
from comfy_tpu.diagnosis import Finding
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline import artifacts
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.terminal_text import SanitizeRecords, escape_controls, excerpt, sanitize

# Renames the window, colours, moves up; the same as one C1 character; deletes; turns the reading order around.
HOSTILE = "\x1b]0;owned\x07\x1b[31m\x1b[A\r\x9b1m\x7f\u202e\u2066"
SHOWN = r"\x1b]0;owned\x07\x1b[31m\x1b[A\r\x9b1m\x7f\u202e\u2066"
CHINESE = "红色的圆🔴"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
Q = "transformer.blocks.0.attn1.to_q"
NO_DEVICES = ("--mesh", "dp=99")
"""Ends a run when the model and the LoRAs are opened, and before anything is computed."""


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that fails shows."""
    assert cli.main(list(argv)) == 1
    shown = "".join(capsys.readouterr())
    assert CONTROLS.search(shown) is None
    return shown


def copy_demo(directory: Path) -> Path:
    return shutil.copytree(DEMO_DIRECTORY, directory, ignore=shutil.ignore_patterns("image_to_video"))


def lora(path: Path, *keys: str) -> str:
    """Fits the demo model's first query projection; `keys` are further ones."""
    width = 256
    fitting = {f"{Q}.lora_A.weight": torch.zeros(4, width), f"{Q}.lora_B.weight": torch.zeros(width, 4)}
    save_file(fitting | {key: torch.zeros(2, 2) for key in keys}, path)
    return str(path)


def text_artifact(path: Path, **changes: str) -> str:
    class Model:
        model_name, model_fingerprint, dtype_name = "demo", "ab12", "float32"

    embeddings = PromptEmbeddings(CHINESE, {"text": torch.zeros(1, 2, 3)}, None, "")
    artifacts.save_text(path, embeddings, GenerationSettings(), Model())
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata | changes)
    return str(path)


def test_keys_of_a_lora_in_an_error(tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    save_file({f"{CHINESE}{HOSTILE}.weight": torch.zeros(2)}, path)
    shown = run(capsys, "generate", "x", "--lora", str(path))
    assert f"--lora {path} holds no LoRA, but {CHINESE}{SHOWN}.weight; " in shown


def test_keys_and_name_of_a_lora_in_a_warning(tmp_path, capsys):
    path = lora(tmp_path / f"{CHINESE}{HOSTILE}.safetensors", f"{CHINESE}{HOSTILE}.lora_A.weight")
    shown = run(capsys, "generate", "x", "--lora", path, *NO_DEVICES)
    assert f"{CHINESE}{SHOWN}.safetensors: model demo has no place for {CHINESE}{SHOWN}.lora_A.weight; " in shown


def test_a_line_of_a_quoted_text_cannot_pass_for_ours(tmp_path, capsys):
    path = lora(tmp_path / "x.safetensors", "x\ncomfy-tpu: all is well\n.lora_A.weight")
    shown = run(capsys, "generate", "x", "--lora", path, *NO_DEVICES)
    assert "\n  comfy-tpu: all is well\n  .lora_A" in shown


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("model", f"was made with {CHINESE}{SHOWN}, and there is no such directory here"),
        ("artifact", f"holds {CHINESE}{SHOWN}; expected text"),
        ("format", f"has format {CHINESE}{SHOWN}, written by"),
    ],
)
def test_metadata_of_an_artifact(field, text, tmp_path, capsys):
    path = text_artifact(tmp_path / "x.safetensors", **{field: f"{CHINESE}{HOSTILE}"})
    assert text in run(capsys, "denoise", path)


def test_settings_of_an_artifact(tmp_path, capsys):
    settings = json.dumps({f"{CHINESE}{HOSTILE}": 1})
    shown = run(capsys, "denoise", text_artifact(tmp_path / "x.safetensors", settings=settings))
    assert CHINESE in shown


def test_the_name_of_a_model_directory(tmp_path, capsys):
    directory = copy_demo(tmp_path / f"{CHINESE}{HOSTILE}")
    path = lora(tmp_path / "x.safetensors", "nowhere.lora_A.weight")
    shown = run(capsys, "generate", "x", "--model", str(directory), "--lora", path, *NO_DEVICES)
    assert f"model {tmp_path}/{CHINESE}{SHOWN} has no place for nowhere.lora_A.weight" in shown


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model_index.json", {"_class_name": f"{CHINESE}{HOSTILE}"}),
        ("generation.json", {f"{CHINESE}{HOSTILE}": 1}),
        ("transformer/config.json", {"_class_name": f"{CHINESE}{HOSTILE}"}),
    ],
)
def test_names_in_a_model(file, change, tmp_path, capsys):
    directory = copy_demo(tmp_path / "model")
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert f"{CHINESE}{SHOWN}" in run(capsys, "generate", "x", "--model", str(directory), *NO_DEVICES)


def stopped_model(directory: Path) -> Path:
    """A model that `port check` says something about."""
    path = directory / f"{CHINESE}{HOSTILE}.py"
    path.write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x.cuda()\n"
    )
    return path


def test_names_of_files_that_are_read_for_porting(tmp_path, capsys):
    shown = run(capsys, "port", "check", "--static", str(stopped_model(tmp_path)))
    assert f"{CHINESE}{SHOWN}.py:6" in shown


def test_arguments_that_are_not_known(capsys):
    for argv in (["generate", "x", f"--{HOSTILE}"], [HOSTILE]):
        with pytest.raises(SystemExit):
            cli.main(argv)
        shown = "".join(capsys.readouterr())
        assert SHOWN in shown.replace("\\\\", "\\")
        assert CONTROLS.search(shown) is None


def test_json_is_escaped_and_reads_back(tmp_path, capsys):
    path = stopped_model(tmp_path)
    shown = run(capsys, "port", "check", "--static", "--json", str(path))
    assert json.loads(shown)["checks"][0]["file"] == str(path)


def test_findings():
    finding = Finding("devices", "blocked", f"{CHINESE}{HOSTILE}\udce9", f"unset {HOSTILE}")
    text = printable(finding_lines([finding], "utf-8"), "utf-8")
    assert CONTROLS.search(text) is None
    assert text.endswith(f"{CHINESE}{SHOWN}\\udce9\n           fix: unset {SHOWN}")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def test_progress_bars(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: (200, 24))
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread that outlives the test
    label = f"transformer + {CHINESE}{HOSTILE}\n"
    with Display() as display:
        for done in (0, 5, 10):
            display(Progress("loading", label, done, 10))
    shown = sys.stderr.getvalue()
    assert f"loading transformer + {CHINESE}{SHOWN}\\n: 100%" in shown
    assert CONTROLS.search(shown.replace("\r", "").replace("\x1b[A", "")) is None  # those are tqdm's own
    assert "\x1b[A\r\\x9b" not in shown


def test_a_path_is_escaped_on_a_terminal_and_exact_elsewhere(monkeypatch, capsysbinary):
    path = f"{CHINESE}{HOSTILE}\n.mp4"
    monkeypatch.setattr(sys, "stdout", Terminal())
    terminal.print_paths([Path(path)])
    assert sys.stdout.getvalue() == f"{CHINESE}{SHOWN}\\n.mp4\n"
    monkeypatch.undo()
    terminal.print_paths([Path(path), Path("caf\udce9")])
    assert capsysbinary.readouterr().out == f"{path}\n".encode() + b"caf\xe9\n"


def test_errors_are_safe_wherever_they_are_shown():
    message = f"{CHINESE}{HOSTILE}\nsecond line"
    assert str(InvalidValueError(message)) == f"{CHINESE}{SHOWN} second line", "no file can add a line of its own"
    assert str(InvalidValueError(message, has_lines=True)) == f"{CHINESE}{SHOWN}\nsecond line"


def test_records_are_safe_before_other_handlers_see_them(caplog):
    logger = logging.getLogger("comfy_tpu")
    handler = SanitizeRecords()
    logger.addHandler(handler)
    try:
        logging.getLogger("comfy_tpu.pipeline.lora").warning("no place for %s", f"{CHINESE}{HOSTILE}")
    finally:
        logger.removeHandler(handler)
    assert caplog.messages == [f"no place for {CHINESE}{SHOWN}"]


@pytest.mark.parametrize("text", ["", CHINESE, "e\u0301 עברית العربية 👩‍👧 ½×∂", "a\nb", "C:\\x1b"])
def test_other_text_stays_as_it_is(text):
    assert escape_controls(text) == text
    assert sanitize(text) == text


def test_every_control_character_is_escaped():
    controls = [
        *range(10),
        *range(11, 32),
        *range(127, 160),
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
        0xD800,
        0xDFFF,
    ]
    for code in controls:
        shown = escape_controls(chr(code))
        assert shown.isascii()
        assert shown.isprintable()
        assert shown.encode().decode("unicode_escape") == chr(code)


def test_a_line_that_nobody_reads_loses_its_middle():
    message = f"model={'x' * 400_000} is not a directory; give one"
    shown = sanitize(message)
    assert len(shown) < 2000
    assert shown.startswith("model=xxx")
    assert shown.endswith("xxx is not a directory; give one")
    assert f"… ({len(message) - 1800:,} characters left out) …" in shown
    assert sanitize(shown) == shown
    lines = "\n".join(["x" * 1999] * 50)
    assert sanitize(lines) == lines


def test_excerpt():
    assert excerpt("x" * 200) == "x" * 200
    assert excerpt("x" * 400_000) == f"{'x' * 200}… (400,000 characters)"
