"""The names of Lightricks' own code for the modules of diffusers, for LoRA files."""

from __future__ import annotations

from collections.abc import Mapping

from comfy_tpu.families.model_family import Rows
from comfy_tpu.families.shared.lora_names import ALL, rename_module

_ORIGINAL_NAMES = (
    (r"^(audio_)?proj_in$", r"\1patchify_proj"),
    (r"^(audio_)?time_embed\.", r"\1adaln_single."),
    (r"^(audio_)?prompt_adaln\.", r"\1prompt_adaln_single."),
    (r"^av_cross_attn_video_scale_shift\.", "av_ca_video_scale_shift_adaln_single."),
    (r"^av_cross_attn_audio_scale_shift\.", "av_ca_audio_scale_shift_adaln_single."),
    (r"^av_cross_attn_video_a2v_gate\.", "av_ca_a2v_gate_adaln_single."),
    (r"^av_cross_attn_audio_v2a_gate\.", "av_ca_v2a_gate_adaln_single."),
    (r"\b(audio|video)_a2v_cross_attn_scale_shift_table$", r"scale_shift_table_a2v_ca_\1"),
    (r"\bnorm_([qk])$", r"\1_norm"),
)


def lora_names(module: str, shape: tuple[int, ...]) -> Mapping[str, Rows]:
    """The name of a module of diffusers in Lightricks' own code, which ComfyUI uses too."""
    return {rename_module(module, _ORIGINAL_NAMES): ALL}
