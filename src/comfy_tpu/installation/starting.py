"""The command line that starts a ComfyUI for the nodes of this pack."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.installation.comfyui import ComfyUI
from comfy_tpu.installation.pack import Pack, is_pack
from comfy_tpu.parallel.tpu_holders import ROOT, find_holders, find_tpu

_NVIDIA_DRIVER = "proc/driver/nvidia/version"
_DEVICE_FLAGS = ("--cpu", "--cuda-device", "--default-device", "--directml", "--gpu-only", "--highvram")


def start_command(comfyui: ComfyUI, arguments: Sequence[str], root: Path = ROOT) -> list[str]:
    """The command, for ComfyUI's directory. Raises where the pack is missing, or another process holds the TPU.

    ComfyUI's own torch runs on the CPU, unless an NVIDIA driver is here or the arguments choose otherwise.
    """
    comfyui.check_version(Pack.here().required_comfyui)
    if not any(map(is_pack, _list_packs(comfyui))):
        install = shlex.join(["comfy-tpu", "install", str(comfyui.directory)])
        raise ComfyTpuError(f"the nodes are not in {comfyui.custom_nodes}; install them first: {install}")
    holders = find_holders(root) if find_tpu(root) is not None else ()
    if holders:
        raise ComfyTpuError(
            f"the TPU is held by {' and '.join(map(str, holders))}; end that first "
            f"(kill {' '.join(str(holder.pid) for holder in holders)})"
        )
    chosen = {argument.partition("=")[0] for argument in arguments}
    needs_cpu = not chosen.intersection(_DEVICE_FLAGS) and not (root / _NVIDIA_DRIVER).exists()
    return [sys.executable, "main.py", *(["--cpu"] if needs_cpu else []), *arguments]


def _list_packs(comfyui: ComfyUI) -> list[Path]:
    if not comfyui.custom_nodes.is_dir():
        return []
    return [entry for entry in comfyui.custom_nodes.iterdir() if not entry.name.endswith(".disabled")]
