"""ComfyUI's entry point, nothing else: the pack is this directory, linked or cloned into ComfyUI's custom_nodes."""

import sys
from pathlib import Path

_SOURCE = Path(__file__).resolve().parent / "src"
if _SOURCE.is_dir() and str(_SOURCE) not in sys.path:
    # At the end: an installed comfy-tpu is found first, and nothing of ours can hide a module of anybody else.
    sys.path.append(str(_SOURCE))

from comfy_tpu.comfy.extension import comfy_entrypoint  # noqa: E402

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
