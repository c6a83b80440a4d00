"""No point at which a stage fails or is killed leaves a traceback, a partial file or another result."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import command_stages, injection
from tests.faults.driver import choose
from tests.faults.examination import Examination, Stage, read_tree

ROOT = Path(__file__).parents[2]
WRITING = ("curve", "artifacts", "npy", "gif", "mp4", "frames")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("faults of the operating system come from a preloaded C library: install gcc, on Linux")
    return injection.build(tmp_path_factory.mktemp("library"))


def start(library: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "LD_PRELOAD": str(library)}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )


def examine(library: Path, directory: Path, sample: int, *stages: str) -> dict[str, Any]:
    done = start(library, ROOT / "tests/faults/driver.py", library, directory, sample, *stages)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["stage"] for report in reports] == list(stages)
    for report in reports:
        assert report["findings"] == []
    return {report["stage"]: report for report in reports}


def test_files(library: Path, tmp_path: Path) -> None:
    """All points of what is written most: a video by libav, a sequence of frames over an older one, artifacts."""
    reports = examine(library, tmp_path, 0, "mp4", "frames", "artifacts")
    for report in reports.values():
        assert report["failed"] > 20
        assert report["kills"] > 5
        assert all(report["points"][kind] for kind in ("create", "open", "write", "rename"))


@pytest.mark.thorough  # by default: the points of files
def test_memory(tmp_path: Path) -> None:
    """Allocations and transfers of `generate`, the first, the last and one between."""
    work = tmp_path / "work"
    work.mkdir()
    stage, _ = command_stages.STAGES["generate"](work, lambda directory: None)
    report = Examination(work, None, choose(1)).examine(stage, kinds=("allocation", "transfer"))
    assert report.findings == []
    assert min(report.points.values()) > 5
    assert report.failed + report.tolerated == 6


@pytest.mark.slow
@pytest.mark.parametrize("stages", [("curve", "npy", "gif"), *((name,) for name in command_stages.STAGES)], ids=str)
def test_every_point(stages: tuple[str, ...], library: Path, tmp_path: Path) -> None:
    for report in examine(library, tmp_path, 0, *stages).values():
        assert report["failed"] + report["tolerated"] + report["kills"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("create", 5), ("write", 2), ("fsync", 2), ("rename", 2), ("rename", 4)])
def test_a_real_kill_leaves_what_an_observed_one_does(kind: str, number: int, library: Path, tmp_path: Path) -> None:
    work, whole = tmp_path / "work", tmp_path / "whole"
    for directory in (work, whole):
        directory.mkdir()
    sheet = ("--contact-sheet", str(work / "sheet.png"), "--checkpoint-every", "1")
    words = command_stages.generate(work / "x.mp4", *sheet)
    killed = start(library, ROOT / "tests/faults/killed.py", library, work, kind, number, *words)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "sheet.png" not in read_tree(work) or kind == "rename"
    assert command_stages.run(*words)[0] == 0
    expected = [word.replace(str(work), str(whole)) for word in words]
    assert command_stages.run(*expected)[0] == 0
    assert read_tree(work) == read_tree(whole)


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """A stage that leaves a part of its file, one that says nothing, and one that gives another result afterwards."""
    work = tmp_path / "work"
    work.mkdir()
    runs = 0

    def fail() -> tuple[int, str]:
        nonlocal runs
        runs += 1
        import numpy as np

        from comfy_tpu import finite

        (work / "x").write_bytes(b"part")
        exec("np.zeros(1)", {"np": np, "__name__": finite.__name__})  # as code of the package
        (work / "x").write_bytes(b"whole" if runs < 3 else b"other")
        return 0, ""

    report = Examination(work, None, choose(0)).examine(Stage("wrong", fail), kinds=("allocation",))
    assert report.failed == 1
    traceback, partial, again, after = report.findings
    assert "wrong: allocation 1: status 99: " in traceback
    assert partial == "wrong: allocation 1: left ['x']"
    assert "run again" in again
    assert "undisturbed after all faults" in after
