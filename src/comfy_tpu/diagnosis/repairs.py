"""Shell commands that repair what the checks find.

pip leaves alone whatever meets a requirement, however broken it is, and `--force-reinstall` replaces every dependency
too, numpy among them, by its newest version. So what is broken is uninstalled first, then installed beside the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet

from comfy_tpu.diagnosis.tested_versions import find_bounds
from comfy_tpu.distribution import pip_command

TORCH_INDEX = "https://download.pytorch.org/whl"
"""Has a folder for each build of torch, by the label in its version: cpu in 2.13.0+cpu."""
_TORCH_LABEL = re.compile(r"cpu|xpu|cu\d+|rocm[\d.]+")

_WITH_SOUND = ("torch==2.13.0", "torchvision==0.28.0", "torchaudio==2.11.0")
_TRACING = ("torch", "jax", "torchax")
"""torchax depends on internals of torch and of jax."""


def install(*requirements: str) -> str:
    return pip_command("install", *requirements)


def reinstall(broken: Sequence[str], *requirements: str) -> str:
    return f"{pip_command('uninstall', '-y', *broken)} && {install(*requirements)}"


def replace_torch_extension(name: str, torch: str) -> str:
    """Installs a torchvision that imports with torch; for a build of torch that PyPI does not have, both from there.

    Tried with torch 2.15.0 of PyPI beside torchvision 0.26.0, and with torch 2.13.0+cpu beside torchvision 0.28.0 of
    PyPI, where all requirements are met and `pip install torchvision` finds nothing to do.

    For torchaudio, the versions that import together: PyPI's newest, 2.11.0, names no torch that it needs. It imports
    beside PyPI's torch 2.11.0 to 2.14.1 (CUDA 13.0), and neither beside 2.15.0 (CUDA 13.2) nor beside 2.13.0+cpu.
    """
    if name == "torchaudio":
        index = torch_index(torch)
        if index is not None:
            return reinstall([name], _WITH_SOUND[-1], "--index-url", index)
        return reinstall(["torch", "torchvision", name], *_WITH_SOUND)
    if "+" in torch:
        return reinstall(["torch", "torchvision"], "torch", "torchvision")
    return reinstall(["torchvision"], f"torch=={torch}", "torchvision")


def install_requirements(file: Path, versions: Mapping[str, str | None]) -> str:
    """ComfyUI's requirements, with the installed torch where the default index has a torchvision for it."""
    torch = versions.get("torch")
    if torch is None:
        return install("-r", str(file))
    if "+" in torch and versions.get("torchvision") is None:
        return reinstall(["torch"], "-r", str(file))
    return install("-r", str(file), f"torch=={torch}")


def torch_index(torch: str) -> str | None:
    """Where packages for this build of torch are; None for the builds that PyPI has, and for anybody's own."""
    label = torch.partition("+")[2]
    return f"{TORCH_INDEX}/{label}" if _TORCH_LABEL.fullmatch(label) else None


def repair_tracing(versions: Mapping[str, str | None]) -> str:
    """The tested versions, or the same ones again where they are tested and still do not work."""
    companions = ["torchvision"] if versions.get("torchvision") else []
    bounds = find_bounds(_TRACING)
    if not all(_is_within(versions.get(name), bounds[name]) for name in _TRACING):
        return install(*(f"{name}{bounds[name]}" for name in _TRACING), *companions)
    same = [f"{name}=={versions[name]}" for name in ("torch", "torchax")]
    index = torch_index(versions["torch"] or "")
    return reinstall(["torch", "torchax"], *same, *(["--extra-index-url", index] if index else []))


def _is_within(version: str | None, bounds: str) -> bool:
    return version is not None and SpecifierSet(bounds).contains(version, prereleases=True)
