"""Can this Python run ComfyUI: is it ComfyUI's own, and is everything there that ComfyUI asks for."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from comfy_tpu.diagnosis import facts
from comfy_tpu.diagnosis.checks import Finding
from comfy_tpu.errors import listed

# torchvision imports only with the one torch that it was built for, which versions alone do not tell.
_IMPORTED = ("torch", "torchvision")
# ComfyUI starts without it, less its audio nodes.
_DISPENSABLE = "torchaudio"
_IMPORT_TIMEOUT_S = 120.0


def own_environment(directory: Path) -> Path | None:
    """The virtual environment that somebody made inside ComfyUI's directory."""
    places = (directory / name for name in ("venv", ".venv"))
    return next((place for place in places if (place / "pyvenv.cfg").is_file()), None)


def import_error(names: Iterable[str]) -> str | None:
    """Tried in a process of its own: a broken torch can take the process with it."""
    command = [sys.executable, "-c", f"import {', '.join(names)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing was not done after {_IMPORT_TIMEOUT_S:.0f} s"
    said = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (said[-1] if said else f"exit status {done.returncode}")


@dataclasses.dataclass(frozen=True)
class ComfyUIProbes:
    """The ways facts are come by. A test gives its own."""

    environment: Callable[[Path], Path | None] = own_environment
    prefix: Callable[[], Path] = lambda: Path(sys.prefix)
    versions: Callable[[Iterable[str]], Mapping[str, str | None]] = facts.versions
    import_error: Callable[[Iterable[str]], str | None] = import_error


def examine_comfyui(directory: Path, probes: ComfyUIProbes | None = None) -> tuple[Finding, ...]:
    probes = probes or ComfyUIProbes()
    essential, others = _requirements(directory / "requirements.txt")
    versions = probes.versions({requirement.name for requirement in (*essential, *others)})
    found = [
        _check_environment(probes.environment(directory), probes.prefix()),
        _check_packages(directory, essential, others, versions),
    ]
    if all(versions.get(name, "") is not None for name in _IMPORTED):
        found.append(_check_imports(probes.import_error(_IMPORTED), versions))
    return tuple(found)


def _check_environment(own: Path | None, prefix: Path) -> Finding:
    if own is None or own.resolve() == prefix.resolve():
        return Finding("environment", "ok", str(prefix))
    detail = f"ComfyUI has an environment of its own, {own}; this is {prefix}"
    fix = f"install comfy-tpu there: {own}/bin/python -m pip install comfy-tpu, or start ComfyUI with {sys.executable}"
    return Finding("environment", "warning", detail, fix)


def _check_packages(
    directory: Path,
    essential: list[Requirement],
    others: list[Requirement],
    versions: Mapping[str, str | None],
) -> Finding:
    fix = f"{sys.executable} -m pip install -r {directory / 'requirements.txt'}"
    name = "its packages"
    if missing := [requirement.name for requirement in essential if versions.get(requirement.name) is None]:
        return Finding(name, "blocked", f"ComfyUI needs {listed(missing)}, not installed here", fix)
    unmet = [
        f"{requirement} (here: {versions.get(requirement.name) or 'none'})"
        for requirement in (*essential, *others)
        if not requirement.specifier.contains(versions.get(requirement.name) or "0", prereleases=True)
        or versions.get(requirement.name) is None
    ]
    if unmet:
        return Finding(name, "warning", f"ComfyUI asks for {listed(unmet)}", fix)
    return Finding(name, "ok", f"all {len(essential) + len(others)} of ComfyUI's requirements.txt")


def _check_imports(error: str | None, versions: Mapping[str, str | None]) -> Finding:
    together = " and ".join(f"{name} {versions.get(name)}" for name in _IMPORTED)
    if error is None:
        return Finding("torchvision", "ok", f"{together} work together")
    torch = (versions.get("torch") or "").partition("+")[0]
    fix = f'{sys.executable} -m pip install "torch=={torch}" torchvision'
    return Finding("torchvision", "blocked", f"{together} do not import together: {error}", fix)


def _requirements(file: Path) -> tuple[list[Requirement], list[Requirement]]:
    """What ComfyUI does not start without, and the rest."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    essential: list[Requirement] = []
    others: list[Requirement] = []
    kind = essential
    for line in lines:
        if line.lstrip().startswith("#"):
            kind = others if "non essential" in line else kind
            continue
        try:
            requirement = Requirement(line.partition(" #")[0])
        except InvalidRequirement:  # an empty line, or an option of pip
            continue
        if requirement.marker is None or requirement.marker.evaluate():
            (others if requirement.name == _DISPENSABLE else kind).append(requirement)
    return essential, others
