"""The preset of `RuntimeConfig.fast`: the parts of it that a run cannot use, with reasons."""

from __future__ import annotations

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.settings import guidance_scales
from comfy_tpu.kernels.quantized import native_format
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.reuse import has_curve


def find_unusable(files: ModelFiles, settings: GenerationSettings, placement: Placement) -> dict[str, str]:
    """The reasons for leaving parts of the preset out, by field. `placement`: where the steps are computed."""
    reasons: dict[str, str] = {}
    if not has_curve(files):
        reasons["reuse"] = f"{files.name} has no reuse.json, which `comfy-tpu calibrate {files.name}` makes"
    dp = placement.sizes.dp
    if files.family.card.guidance != "classifier_free":
        reasons["guidance_until"] = f"{files.family.name} has no branch for a negative prompt"
    elif not files.family.card.is_guided(max(guidance_scales(settings))):
        reasons["guidance_until"] = f"guidance_scale={settings.guidance_scale:g} computes one branch anyway"
    elif settings.num_videos % dp:
        reasons["guidance_until"] = f"it saves no time on a mesh with dp={dp}, which divides two branches but not one"
    if native_format(placement.platform, placement.chip) == "none":
        device = "a CPU" if placement.platform == "cpu" else placement.chip
        reasons["quantize"] = f"{device} has no faster 8-bit products"
    return reasons
