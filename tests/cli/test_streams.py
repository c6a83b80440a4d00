"""Commands whose standard streams are closed, full, or read by nobody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_tpu.cli.main import main

ROOT = Path(__file__).parents[2]

# A command that warns, reports, and notes where the first file that it opens is put.
LOOKING = """
import json, os, sys, types
from comfy_tpu.cli import main as cli, options
from comfy_tpu.cli.terminal import print_message

def run(arguments):
    print_message("a warning")
    if arguments.prompt == "-":
        sys.stdin.buffer.read()
    with open("made.json", "w") as file:
        json.dump({"number": file.fileno()}, file)
    os.write(2, b"of a library\\n")
    print(arguments.prompt)
    return 0

module = types.ModuleType("looking")
sys.modules["looking"] = module
module.add_arguments, module.run = options.add_prompt, run
cli.COMMANDS = (cli.Command("look", "", "looking"),)
sys.exit(cli.main())
"""


def shell(command: list[str], redirections: str, cwd: Path) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command with what a shell does to its streams."""
    words = " ".join(f"'{word}'" for word in command)
    done = subprocess.run(
        ["bash", "-c", f"{words} {redirections}"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def look(tmp_path: Path) -> list[str]:
    script = tmp_path / "look.py"
    script.write_text(LOOKING)  # a file, as an installed command is: Python has read it before it runs
    return [sys.executable, str(script), "look"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_streams_are_nobodys(closed: str, look: list[str], tmp_path: Path) -> None:
    status, out, err = shell([*look, "report"], closed, tmp_path)
    assert status == 0
    assert out == ("" if ">&-" in closed.split() else "report\n")  # and no warning, whatever is closed
    assert err == ("" if "2>&-" in closed else "comfy-tpu: a warning\nof a library\n")
    assert json.loads((tmp_path / "made.json").read_text())["number"] > 2


@pytest.mark.default_cases(
    "stdout full-",
    "stdout not writable-",
    "stderr full-",
    "stderr full-1",
    "stderr unread-",
    "stdout unread-",
    "stdin closed-1",
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirections", "words", "status", "error"),
    [
        (">/dev/full", ["report"], 1, "comfy-tpu: standard output could not be written: No space left on device"),
        ("1</dev/null", ["report"], 1, "comfy-tpu: standard output could not be written: Bad file descriptor"),
        ("2>/dev/full", ["report"], 0, ""),
        ("2>&1 >/dev/null | (exec <&-); exit ${PIPESTATUS[0]}", ["report"], 0, ""),
        ("| (exec <&-); exit ${PIPESTATUS[0]}", ["report"], 1, ""),
        ("<&-", ["-"], 0, ""),
    ],
    ids=["stdout full", "stdout not writable", "stderr full", "stderr unread", "stdout unread", "stdin closed"],
)
def test_streams_that_fail(
    redirections: str,
    words: list[str],
    status: int,
    error: str,
    unbuffered: str,
    look: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    found, _, err = shell([*look, *words], redirections, tmp_path)
    assert found == status
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert error in err
    assert (tmp_path / "made.json").exists()


def test_help_that_cannot_be_written(look: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    status, _, err = shell([*look, "--help"], ">/dev/full", tmp_path)
    expected = "comfy-tpu: standard output could not be written: No space left on device; send it elsewhere\n"
    assert (status, err) == (1, expected)


def test_a_prompt_from_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["generate", "-"]) == 1
    assert capsys.readouterr().err == "comfy-tpu: PROMPT cannot be read from standard input (read); give it as text\n"


@pytest.mark.slow  # by default: test_closed_streams_are_nobodys
def test_a_video_is_written_with_nothing_open(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("fake_pipeline.py")), "generate", "a", "-o", "x.mp4"]
    assert shell(command, "<&- >&- 2>&-", tmp_path)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]
    assert (tmp_path / "x.mp4").read_bytes()[4:8] == b"ftyp"


def test_names_that_are_not_utf8_are_printed_as_they_are(look: list[str], tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.mp4")
    assert shell([*look, name], "2>/dev/null", tmp_path) == (0, f"{name}\n", "")
