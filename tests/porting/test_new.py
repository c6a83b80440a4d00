"""`port new` in a copy of this checkout, and as a pack without one: the parity test passes unedited.

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
MODULES = ("__init__", "card", "model", "text", "transformer", "vae")
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


def run(source: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in `directory`, with the comfy_tpu of `source` and nothing else of this checkout."""
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{directory}"}
    return subprocess.run(
        [sys.executable, "-P", "-W", "ignore", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def check_report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["unexplained"] == []
    assert report["tested"] is True
    assert report["seconds_to_a_frame"] > 0
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"), [("cogvideox", "CogVideoXPipeline"), ("auraflow", "AuraFlowPipeline")], ids=["video", "image"]
)
def test_a_family_in_a_checkout(name: str, model: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    before = contents(checkout)
    command = ("-m", "comfy_tpu.cli", "port", "new", name, "--from", model, "--json", "--into", str(checkout))
    report = check_report(run(checkout / "src", checkout, *command))
    after = contents(checkout)
    changed = {path for path, content in after.items() if before.get(path) != content}
    family = {f"src/comfy_tpu/families/{name}/{module}.py" for module in MODULES}
    assert changed == {*family, "src/comfy_tpu/families/registry.py", f"tests/families/ported/{name}.py"}
    assert changed == set(report["files"])
    again = run(checkout / "src", checkout, *command)
    assert again.returncode == 1
    assert f"NAME {name} is taken" in again.stderr
    pages = run(checkout / "src", checkout, "-m", "tools.pages")
    assert pages.returncode == 1
    assert "nodeDefs.json has no " in pages.stdout
    tests = ("tests/test_architecture.py::test_tool_is_content", "tests/families/test_names.py")
    checked = run(checkout / "src", checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert checked.returncode == 0, checked.stdout


def contents(checkout: Path) -> dict[str, bytes]:
    return {
        path.relative_to(checkout).as_posix(): path.read_bytes()
        for path in checkout.rglob("*")
        if path.is_file() and not {"__pycache__", "build", ".hypothesis"} & set(path.parts[len(checkout.parts) :])
    }


@pytest.mark.slow
def test_a_pack_without_a_checkout(tmp_path: Path) -> None:
    """As from an installed wheel: the package alone, no repository around it, no git."""
    site, empty, pack = tmp_path / "site", tmp_path / "empty", tmp_path / "ComfyUI-PixArtSigma-TPU"
    shutil.copytree(ROOT / "src" / "comfy_tpu", site / "comfy_tpu", ignore=shutil.ignore_patterns("__pycache__"))
    empty.mkdir()
    command = ("-m", "comfy_tpu.cli", "port", "new", "pixart_sigma", "--from", "PixArtSigmaPipeline", "--json")
    nowhere = run(site, empty, *command)
    assert nowhere.returncode == 1
    assert "no checkout is here, nor around this comfy-tpu; give --pack DIR" in nowhere.stderr
    dry = run(site, empty, *command, "--pack", str(pack), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert not pack.exists()
    report = check_report(run(site, empty, *command, "--pack", str(pack)))
    assert not list(empty.iterdir())
    assert set(contents(pack)) == set(report["files"])
    again = run(site, empty, *command, "--pack", str(pack))
    assert again.returncode == 1
    assert f"--pack {pack} is not empty" in again.stderr
