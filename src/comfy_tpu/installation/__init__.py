"""Installs the pack into a ComfyUI directory, removes it, and starts that ComfyUI."""

from comfy_tpu.installation.comfyui import ComfyUI
from comfy_tpu.installation.custom_nodes import PACK_NAME, Outcome, install_pack, remove_pack
from comfy_tpu.installation.pack import Pack
from comfy_tpu.installation.starting import start_command

__all__ = ["PACK_NAME", "ComfyUI", "Outcome", "Pack", "install_pack", "remove_pack", "start_command"]
