"""The package as a user gets it: built, and installed into an environment of its own from which the checkout cannot be
imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Without those of our own site: an editable install is a .pth there, and would bring the checkout along.
_SITES = "import json, sys; print(json.dumps([p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))]))"


def build(kind: str, target: Path, source: Path = ROOT) -> Path:
    """A "wheel" or an "sdist", without pip, so that no network is needed."""
    code = f"from hatchling.build import build_{kind}; print(build_{kind}({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True)
    return target / done.stdout.splitlines()[-1]


class Installed:
    """A new virtual environment with the wheel, which borrows every other package from `python`'s."""

    def __init__(self, directory: Path, wheel: Path, python: str | Path = sys.executable) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        subprocess.run([python, "-m", "venv", "--without-pip", directory], check=True)
        sites = subprocess.run([python, "-c", _SITES], env=self.environment(), check=True, capture_output=True)
        (site,) = directory.glob("lib/python*/site-packages")
        # Paths that a .pth adds have their own .pth files ignored, the editable install among them.
        (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in json.loads(sites.stdout)))
        self.package = site / "comfy_tpu"
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps", "--force-reinstall"]
        subprocess.run([*pip, wheel], env=self.environment(), check=True, capture_output=True)

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**kept, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **changes}

    def run(self, *command: str | Path, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
        """`comfy-tpu`, `python` or another script of the environment."""
        program, *arguments = command
        return subprocess.run(
            [self.directory / "bin" / program, *arguments],
            cwd=cwd,
            env=self.environment(**changes),
            capture_output=True,
            text=True,
            check=False,
        )
