"""Installs the pack into custom_nodes, or removes it. Other files are neither changed nor removed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.installation.comfyui import ComfyUI
from comfy_tpu.installation.pack import FILES, Pack, is_pack

PACK_NAME = "ComfyUI-TPU"

_COPY_MARKER = ".comfy-tpu-copy"
"""A file in copies that `install` made, which it may replace or remove. A clone of the repository has none."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    path: Path
    changed: bool
    detail: str


def install_pack(comfyui: ComfyUI, pack: Pack, *, copy: bool = False) -> Outcome:
    target = comfyui.custom_nodes / PACK_NAME
    if already := _find_other_copy(comfyui, pack):
        return Outcome(already, False, f"in its place already: {already}")
    if target.is_symlink() and not copy and target.resolve() == pack.directory.resolve():
        return Outcome(target, False, f"linked already: {target} -> {pack.directory}")
    replaced = _describe_ours(target)
    with _write_errors(target):
        comfyui.custom_nodes.mkdir(exist_ok=True)
        _install_to(pack, target, copy)
    done = f"copied to {target}" if copy else f"linked: {target} -> {pack.directory}"
    return Outcome(target, True, f"{done} (in the place of {replaced})" if replaced else done)


def remove_pack(comfyui: ComfyUI) -> Outcome:
    target = comfyui.custom_nodes / PACK_NAME
    if not _exists(target):
        return Outcome(target, False, f"not installed: there is no {target}")
    what = _describe_ours(target)
    with _write_errors(target):
        _delete(target)
    return Outcome(target, True, f"removed {target}, {what}")


def _find_other_copy(comfyui: ComfyUI, pack: Pack) -> Path | None:
    """The place of this checkout in custom_nodes if it was cloned or linked there by hand; it must not be there
    twice."""
    if not comfyui.custom_nodes.is_dir():
        return None
    for entry in sorted(comfyui.custom_nodes.iterdir()):
        ours = entry.is_dir() and entry.resolve() == pack.directory.resolve()
        if ours and not (entry.name == PACK_NAME and entry.is_symlink()) and not entry.name.endswith(".disabled"):
            return entry
    return None


def _describe_ours(target: Path) -> str | None:
    """A description of the installed pack; None if there is none. Raises InvalidValueError for files of others."""
    if target.is_symlink():
        if not target.exists():
            return f"a link to {target.readlink()}, which is gone"
        if is_pack(target):
            return f"a link to {target.readlink()}"
        raise InvalidValueError(
            f"{target} is a link to {target.readlink()}, which is not this pack; it stays: move it away first"
        )
    if not target.exists():
        return None
    if (target / _COPY_MARKER).is_file():
        return "a copy of the pack"
    what = "a checkout of its own" if is_pack(target) else "something else than this pack"
    raise InvalidValueError(f"{target} is {what}; it stays: move it away first")


def _install_to(pack: Pack, target: Path, copy: bool) -> None:
    # ComfyUI passes over names that end so: a copy that is only half there is never loaded.
    partial = target.with_name(f".{PACK_NAME}-{os.getpid()}.disabled")
    try:
        if copy:
            _copy(pack, partial)
        else:
            partial.symlink_to(pack.directory, target_is_directory=True)
        _delete(target)
        partial.rename(target)
    except BaseException:
        _delete(partial)
        raise


def _copy(pack: Pack, partial: Path) -> None:
    partial.mkdir()
    for name in FILES:
        source = pack.directory / name
        if source.is_dir():
            shutil.copytree(source, partial / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy2(source, partial / name)
    (partial / _COPY_MARKER).write_text(f"Made by `comfy-tpu install --copy` from {pack.directory}\n", encoding="utf-8")


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.exists()


@contextlib.contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ComfyTpuError(
            f"{target} could not be written: {error.strerror or error}; where links are not possible use --copy, and "
            "a user who may write there"
        ) from error
