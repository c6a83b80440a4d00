"""make test-versions: a core of the tests on every Python with the oldest and the newest versions that are allowed.

Results go to src/comfy_tpu/diagnosis/tested_versions.json, one entry for each environment that passed, and from there
into the README by `make pages`. Each environment takes gigabytes, and is removed when its tests have ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from comfy_tpu.diagnosis.tested_versions import FILE
from tools.version_tests.environments import (
    Environment,
    InstallationError,
    installed_versions,
    make_environment,
)

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
TEST_TOOLS = ("pytest>=8.4", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "accelerate", "peft", "absl-py", "flax>=0.12")
CORE = (
    *("tests/bridge/test_operators.py", "tests/bridge/test_views.py", "tests/bridge/test_scope.py"),
    *("tests/compiler/test_program.py", "tests/compiler/test_stored.py", "tests/compiler/test_hosted.py"),
    *("tests/compiler/test_quantization.py", "tests/cli/test_cache.py"),
    *("tests/kernels/test_parity.py", "tests/kernels/test_tpu_lowering.py", "tests/kernels/test_gpu_lowering.py"),
    *("tests/parity/test_wan_components.py", "tests/pipeline/test_video.py", "tests/pipeline/test_demo.py"),
    *("tests/families/test_flux.py", "tests/families/test_ltx.py"),
)
"""Operators, kernels, programs, the demo models, and families against diffusers."""
logger = logging.getLogger("tools.version_tests")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.version_tests", description=__doc__)
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), choices=PYTHONS)
    parser.add_argument("--age", nargs="+", default=["oldest", "newest"], choices=["oldest", "newest"])
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "versions", help="for the environments")
    parser.add_argument("--tests", nargs="+", default=list(CORE), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    failed = []
    for environment in [Environment(python, age) for python in arguments.python for age in arguments.age]:
        try:
            record(environment, run(environment, arguments.directory / environment.name, arguments.tests))
        except InstallationError as error:
            logger.error("%s: %s", environment.name, error)
            failed.append(environment.name)
    if failed:
        logger.error("failed: %s", ", ".join(failed))
    return len(failed)


def run(environment: Environment, place: Path, tests: list[str]) -> dict[str, Any]:
    """The versions and the number of passed tests; raises InstallationError where one failed."""
    try:
        python = make_environment(environment, ROOT, place, TEST_TOOLS)
        packages = installed_versions(python)
        logger.info("%s: %s", environment.name, packages)
        command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-q", "-rf", "--tb=short", *tests]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        (place.parent / f"{environment.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        last = done.stdout.strip().splitlines()[-1]
        logger.info("%s: %s", environment.name, last)
        if done.returncode:
            raise InstallationError(f"tests failed with {packages}; see {place.parent / environment.name}.log")
        version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
        passed = re.search(r"(\d+) passed", last)
        return {"python": version, "packages": packages, "passed": int(passed[1]) if passed else 0}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def record(environment: Environment, result: dict[str, Any]) -> None:
    """Replaces the entry of an environment."""
    runs = json.loads(FILE.read_text(encoding="utf-8"))["runs"] if FILE.is_file() else []
    entry = {"environment": environment.name, **result}
    runs = sorted([*(each for each in runs if each["environment"] != environment.name), entry], key=_order)
    FILE.write_text(json.dumps({"runs": runs}, indent=2) + "\n", encoding="utf-8")


def _order(entry: dict[str, Any]) -> tuple[str, bool]:
    python, age = entry["environment"].split("-")
    return python, age == "newest"


if __name__ == "__main__":
    sys.exit(main())
