"""The names of Lightricks' own code for the modules of diffusers, for LoRA files."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.shared.lora_names import ALL, rename_module

_ORIGINAL_NAMES = (
    (r"^proj_in$", "patchify_proj"),
    (r"^time_embed\.", "adaln_single."),
    (r"\bnorm_([qk])$", r"\1_norm"),
)


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    """The name of a module of diffusers in Lightricks' own code, which ComfyUI uses too."""
    return {rename_module(module, _ORIGINAL_NAMES): ALL}
