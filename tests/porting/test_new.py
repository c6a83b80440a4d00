"""`port new` in a copy of this checkout: the family's own test passes, and so does whatever looks at all families.

Minutes each: a small model is watched, tried, written, and compared with diffusers on three meshes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = (
    "__pycache__",
    ".git",
    ".venv",
    "ComfyUI",
    "build",
    "dist",
    "outputs",
    "*.egg-info",
    ".mypy_cache",
    ".ruff_cache",
    "node_modules",
)


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "noun"),
    [("pixart_sigma", "PixArtSigmaPipeline", "picture"), ("cogvideox", "CogVideoXPipeline", "video")],
)
def test_a_family_that_needs_no_edit(name: str, model: str, noun: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    command = ["-m", "comfy_tpu.cli", "port", "new", name, "--from", model, "--json", "--into", str(checkout)]
    if noun == "picture":  # once is enough
        dry = run(checkout, *command, "--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert not (checkout / f"src/comfy_tpu/families/{name}.py").exists()
    done = run(checkout, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["unexplained"] == []
    assert report["tested"] is True
    assert report["seconds_to_a_frame"] > 0
    assert f"tests/families/test_{name}.py" in report["files"]
    assert "that_of_diffusers" in (checkout / f"tests/families/test_{name}.py").read_text()
    assert noun in (checkout / f"src/comfy_tpu/families/{name}.py").read_text()
    again = run(checkout, *command)
    assert again.returncode == 1
    assert "nothing is overwritten" in again.stderr
    tests = (
        "tests/comfy_pack",
        "tests/test_architecture.py",
        "tests/test_documents.py",
        "tests/bridge/test_aten_operators.py",
    )
    checked = run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert checked.returncode == 0, checked.stdout
