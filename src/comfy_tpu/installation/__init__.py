"""The pack into a ComfyUI directory, and out of it again."""

from comfy_tpu.installation.comfyui import ComfyUI
from comfy_tpu.installation.pack import Pack
from comfy_tpu.installation.placing import PACK_NAME, Outcome, place, remove

__all__ = ["PACK_NAME", "ComfyUI", "Outcome", "Pack", "place", "remove"]
