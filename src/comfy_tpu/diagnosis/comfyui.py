"""Checks whether this Python can run ComfyUI: whether it is ComfyUI's own, and has the packages that ComfyUI
requires."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from comfy_tpu.diagnosis import facts, repairs
from comfy_tpu.diagnosis.checks import Finding
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import join_names

_SOUND = "torchaudio"
_IMPORTS_SOUND = "comfy/ldm/lightricks/vae/audio_vae.py"
"""A file of each ComfyUI that does not start without torchaudio; an older one starts, less its audio nodes."""


def own_environment(directory: Path) -> Path | None:
    """The virtual environment inside ComfyUI's directory, if there is one."""
    places = (directory / name for name in ("venv", ".venv"))
    return next((place for place in places if (place / "pyvenv.cfg").is_file()), None)


@dataclasses.dataclass(frozen=True)
class ComfyUIProbes:
    """The functions that gather facts; tests replace them."""

    environment: Callable[[Path], Path | None] = own_environment
    prefix: Callable[[], Path] = lambda: Path(sys.prefix)
    versions: Callable[[Iterable[str]], Mapping[str, str | None]] = facts.versions


def examine_comfyui(directory: Path, probes: ComfyUIProbes | None = None) -> tuple[Finding, ...]:
    probes = probes or ComfyUIProbes()
    essential, others = _requirements(directory)
    versions = probes.versions({requirement.name for requirement in (*essential, *others)})
    return (
        _check_environment(probes.environment(directory), probes.prefix()),
        _check_packages(directory, essential, others, versions),
    )


def _check_environment(own: Path | None, prefix: Path) -> Finding:
    if own is None or own.resolve() == prefix.resolve():
        return Finding("environment", "ok", str(prefix))
    detail = f"ComfyUI has an environment of its own, {own}; this is {prefix}"
    there = install_command(python=own / "bin" / "python")
    fix = f"install comfy-tpu there: {there}, or start ComfyUI with {shlex.quote(sys.executable)}"
    return Finding("environment", "warning", detail, fix)


def _check_packages(
    directory: Path,
    essential: list[Requirement],
    others: list[Requirement],
    versions: Mapping[str, str | None],
) -> Finding:
    fix = repairs.install_requirements(directory / "requirements.txt", versions)
    name = "its packages"
    if missing := [requirement.name for requirement in essential if versions.get(requirement.name) is None]:
        if missing == [_SOUND]:
            fix = repairs.replace_torch_extension(_SOUND, versions["torch"] or "")
        return Finding(name, "blocked", f"ComfyUI needs {join_names(missing)}, not installed here", fix)
    unmet = {
        requirement.name: f"{requirement} (here: {versions.get(requirement.name) or 'none'})"
        for requirement in (*essential, *others)
        if not requirement.specifier.contains(versions.get(requirement.name) or "0", prereleases=True)
        or versions.get(requirement.name) is None
    }
    if list(unmet) == [_SOUND]:
        return Finding(name, "warning", f"ComfyUI asks for {unmet[_SOUND]}, which only its audio nodes need")
    if unmet:
        return Finding(name, "warning", f"ComfyUI asks for {join_names(unmet.values())}", fix)
    return Finding(name, "ok", f"all {len(essential) + len(others)} of ComfyUI's requirements.txt")


def _requirements(directory: Path) -> tuple[list[Requirement], list[Requirement]]:
    """The requirements without which ComfyUI does not start, and the others."""
    file = directory / "requirements.txt"
    needs_sound = (directory / _IMPORTS_SOUND).is_file()
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
            is_optional = requirement.name == _SOUND and not needs_sound
            (others if is_optional else kind).append(requirement)
    return essential, others
