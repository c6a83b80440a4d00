"""Where a real ComfyUI is, and a Python that can run it. Tests that find neither skip, with the reason in one line."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Distributions, not modules: ComfyUI's own list names distributions. The second part is what our nodes need at a run.
_ASK = """
import importlib.metadata, json, sys
def missing(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return True
print(json.dumps([name for name in sys.argv[1:] if missing(name)]))
"""
# torchaudio, which is late for new versions of torch: ComfyUI 0.7 starts without it and says what it then lacks.
_NOT_NEEDED = {(0, 7): ("torchaudio",)}
_OURS = ("jax", "torchax", "diffusers", "ftfy", "platformdirs", "jaxtyping")


class NoComfyUIError(Exception):
    """The reason, in one line."""


@dataclass(frozen=True)
class Checkout:
    path: Path
    python: Path

    @property
    def version(self) -> tuple[int, ...]:
        text = (self.path / "comfyui_version.py").read_text(encoding="utf-8")
        found = re.search(r'__version__ = "([0-9.]+)', text)
        assert found is not None, text
        return tuple(int(part) for part in found[1].split("."))


@functools.cache
def find_checkout() -> Checkout:
    path = find_path()
    if importlib.util.find_spec("aiohttp") is None:
        raise NoComfyUIError("the client of ComfyUI's API needs aiohttp: pip install '.[comfy]'")
    python = Path(os.environ.get("COMFYUI_PYTHON") or sys.executable).expanduser()
    if not python.is_file():
        raise NoComfyUIError(f"COMFYUI_PYTHON={python} does not exist")
    found = Checkout(path, python)
    wanted = [name for name in _requirements(path) if name not in _NOT_NEEDED.get(found.version[:2], ())]
    if missing := _missing(python, (*wanted, *_OURS)):
        raise NoComfyUIError(
            f"{python} cannot run ComfyUI: it lacks {', '.join(missing)}; name another Python in COMFYUI_PYTHON"
        )
    return found


def find_pack(variable: str, name: str, checkout: Checkout) -> Path | None:
    """Another node pack: named by an environment variable, or among the checkout's own."""
    candidates = [Path(os.environ[variable]).expanduser()] if os.environ.get(variable) else []
    candidates.append(checkout.path / "custom_nodes" / name)
    return next((path.resolve() for path in candidates if (path / "__init__.py").is_file()), None)


def find_path() -> Path:
    named = os.environ.get("COMFYUI_PATH")
    if named:
        path = Path(named).expanduser()
        if not _is_comfyui(path):
            raise NoComfyUIError(f"COMFYUI_PATH={named} is not a ComfyUI checkout: it has no main.py and comfy/")
        return path.resolve()
    for path in (ROOT / "ComfyUI", ROOT.parent / "ComfyUI", Path.home() / "ComfyUI"):
        if _is_comfyui(path):
            return path.resolve()
    raise NoComfyUIError("no ComfyUI in COMFYUI_PATH, ./ComfyUI, ../ComfyUI or ~/ComfyUI")


def _is_comfyui(path: Path) -> bool:
    return (path / "main.py").is_file() and (path / "comfy").is_dir()


def _requirements(path: Path) -> list[str]:
    text = (path / "requirements.txt").read_text(encoding="utf-8").split("#non essential")[0]
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [re.split(r"[<>=~!\[; ]", line)[0] for line in lines if line]


def _missing(python: Path, names: tuple[str, ...]) -> list[str]:
    done = subprocess.run([python, "-c", _ASK, *names], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found
