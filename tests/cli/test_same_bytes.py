"""The whole command, again and again: the same request is the same file in every format."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTPUTS = ("x.mp4", "x.gif", "x.npy", "frames/")

# One process for the four formats: each is a whole `comfy-tpu generate`.
GENERATE = """
import sys
from comfy_tpu.cli.main import main
for output in sys.argv[2:]:
    flags = ["--steps", "2", "--seed", "3", "--mesh", "single", "--platform", "cpu"]
    status = main(["generate", "a red circle moving left", *flags, "-o", f"{sys.argv[1]}/{output}"])
    if status:
        sys.exit(status)
"""


def files(directory: Path) -> dict[str, str]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_runs_with_perturbed_malloc(tmp_path: Path) -> None:
    found = []
    for number in range(10):
        directory = tmp_path / str(number)
        directory.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
            "MALLOC_PERTURB_": str(25 * number),
        }
        command = [sys.executable, "-c", GENERATE, str(directory), *OUTPUTS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(files(directory))
    assert len(found[0]) == 3 + 17
    assert all(other == found[0] for other in found[1:])
