"""ComfyUI's own tests, without the pack and with it: what passed without it passes with it."""

import os
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.comfyui.checkout import ROOT, Checkout
from tests.comfyui.server import PACK

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]

FOLDERS = ("tests-unit", "tests/execution")
NEEDED = ("pytest_asyncio", "pytest_aiohttp", "websocket")
_LEFT_OUT = shutil.ignore_patterns(".git", "models", "output", "temp", "user", "__pycache__")


@pytest.fixture(scope="module")
def copied(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ask = f"import {', '.join(NEEDED)}"
    if subprocess.run([checkout.python, "-c", ask], capture_output=True, check=False).returncode:
        pytest.skip(f"{checkout.python} lacks what ComfyUI's tests need: {', '.join(NEEDED)}")
    copy = tmp_path_factory.mktemp("theirs") / "ComfyUI"
    shutil.copytree(checkout.path, copy, ignore=_LEFT_OUT)
    shutil.copytree(checkout.path / "models", copy / "models", ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def passed(checkout: Checkout, copy: Path, folder: str) -> set[str]:
    report = copy.parent / "report.xml"
    # They start `python main.py`.
    environment = {**os.environ, "PATH": f"{checkout.python.parent}:{os.environ['PATH']}"}
    environment.pop("XLA_FLAGS", None)
    command = [checkout.python, "-m", "pytest", "-q", folder, "-p", "no:cacheprovider", f"--junit-xml={report}"]
    subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False, timeout=1200)
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}" for case in cases if not len(case)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_passes_without_the_pack_passes_with_it(checkout: Checkout, copied: Path, folder: str) -> None:
    before = passed(checkout, copied, folder)
    assert len(before) > 100
    link = copied / "custom_nodes" / PACK
    link.symlink_to(ROOT, target_is_directory=True)
    try:
        assert before - passed(checkout, copied, folder) == set()
    finally:
        link.unlink()
