"""Commands whose standard streams are closed, full, or read by nobody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(Path(__file__).with_name("fake_pipeline.py"))]
WARNING = "PROMPT is longer than the model reads"
LONG = "a prompt of more words than the small text encoder reads at all"

# A command that says where the first file that it opens is put, and what the three streams are.
LOOKING = """
import json, os, sys, types
from comfy_tpu.cli import main as cli
def run(arguments):
    first = os.open(sys.argv[0] or ".", os.O_RDONLY)
    print("report"); print("warning", file=sys.stderr)
    with open("seen.json", "w") as file:
        json.dump({"first": first, "prompt": sys.stdin.read()}, file)
    os.write(2, b"a library's warning")
    return 0
module = types.ModuleType("looking"); sys.modules["looking"] = module
module.add_arguments, module.run = lambda parser: None, run
cli.COMMANDS = (cli.Command("look", "", "looking"),)
sys.exit(cli.main(["look"]))
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


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_files_do_not_get_the_numbers_of_closed_streams(closed: str, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOKING)  # a file, as an installed command is: Python reads it before it runs
    status, out, err = shell([sys.executable, str(script)], closed, tmp_path)
    assert status == 0
    assert out == ("" if ">&-" in closed.split() else "report\n")
    assert err == ("" if "2>&-" in closed else "warning\na library's warning")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["first"] > 2
    assert seen["prompt"] == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_video_is_written_whatever_is_closed(closed: str, tmp_path: Path) -> None:
    command = [*COMMAND, "generate", LONG, "--json", "-o", "x.npy"]
    status, out, err = shell(command, closed, tmp_path)
    assert status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    if ">&-" not in closed.split():
        assert json.loads(out)["outputs"] == ["x.npy"]  # and no warning among it
    assert (WARNING in err) == ("2>&-" not in closed)


@pytest.mark.parametrize(
    ("redirections", "words", "status", "error"),
    [
        (">/dev/full", ["generate", "a", "-o", "x.npy"], 1, "standard output could not be written: No space left"),
        (">/dev/full", ["--help"], 1, "standard output could not be written: No space left"),
        ("1</dev/null", ["generate", "a", "-o", "x.npy"], 1, "standard output could not be written: Bad file"),
        ("2>/dev/full", ["generate", LONG, "-o", "x.npy"], 0, ""),
        ("2> >(exec 0<&-; sleep 0)", ["generate", LONG, "-o", "x.npy"], 0, ""),
        ("<&-", ["generate", "-", "-o", "x.npy"], 1, "PROMPT '' is empty"),
        ("0>out", ["generate", "-", "-o", "x.npy"], 1, "PROMPT cannot be read from standard input (not readable)"),
    ],
    ids=["stdout full", "help full", "stdout not writable", "stderr full", "stderr unread", "no stdin", "stdin a file"],
)
def test_streams_that_fail(redirections: str, words: list[str], status: int, error: str, tmp_path: Path) -> None:
    found, _, err = shell([*COMMAND, *words], redirections, tmp_path)
    assert found == status
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert err.startswith(f"comfy-tpu: {error}" if error else "")
    assert (tmp_path / "x.npy").exists() == ("generate" in words and "-" not in words)


def test_nobody_reads_the_output(tmp_path: Path) -> None:
    status, _, err = shell([*COMMAND, "generate", "a", "-o", "x.npy"], "| head -c 0; exit ${PIPESTATUS[0]}", tmp_path)
    assert (status in (0, 1), err) == (True, "")  # 1 if it was written after head had gone
    assert (tmp_path / "x.npy").exists()


def test_names_that_are_not_utf8_are_printed_as_they_are(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.npy")
    assert shell([*COMMAND, "generate", "a", "-o", name], "", tmp_path) == (0, f"{name}\n", "")
    assert [path.name for path in tmp_path.iterdir()] == [name]
