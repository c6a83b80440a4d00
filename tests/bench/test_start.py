"""benchmarks/start: what it is given is checked before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.start import __main__ as start


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What would have run, in a directory with a file and nothing else."""
    found: list[list[str]] = []

    def run_command(arguments: list[str]) -> dict[str, Any]:
        found.append(arguments)
        return {"seconds": {"done": float(len(found))}}

    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "run_command", run_command)
    return found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--runs", "0"], "--runs 0 is too few; give 1 or more"),
        (["--steps", "0"], "--steps 0 is too few; give 1 or more"),
        (["--prompts", "-1"], "--prompts -1 is too few; give 0 or more"),
        (["--json", "none/x.json"], "--json none/x.json is in none, and there is no none; create it first"),
        (["--json", "file/x.json"], "--json file/x.json is inside file, which is a file; choose another place"),
        (["--json", "."], "--json . is a directory"),
        (["--directory", "file/x"], "--directory file/x cannot be made (Not a directory); choose another place"),
    ],
)
def test_what_would_fail_after_minutes_fails_at_once(
    arguments: list[str],
    text: str,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["start", *arguments])
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 2
    assert f"error: {text}" in capsys.readouterr().err
    assert commands == []


def test_the_result_may_lie_in_the_directory_that_it_makes(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["start", "--directory", "a/b", "--runs", "2", "--json", "a/b/x.json"])
    start.main()
    assert [command[0] for command in commands] == ["warm", "generate", "generate"]
    assert json.loads(Path("a/b/x.json").read_text()) == json.loads(capsys.readouterr().out)
