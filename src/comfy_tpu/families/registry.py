"""Every family of models, and which of them a model directory is of."""

from __future__ import annotations

from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.family import Config, VideoFamily
from comfy_tpu.families.flux import FLUX_DEV, FLUX_SCHNELL
from comfy_tpu.families.flux2 import FLUX2_DEV, FLUX2_KLEIN, FLUX2_KLEIN_BASE
from comfy_tpu.families.hunyuan import HUNYUAN15
from comfy_tpu.families.hunyuan_image import HUNYUAN15_IMAGE
from comfy_tpu.families.ltx import LTX_VIDEO
from comfy_tpu.families.wan import WAN21
from comfy_tpu.families.wan22 import WAN21_FIRST_LAST, WAN21_IMAGE, WAN22, WAN22_5B, WAN22_IMAGE

PORTED: tuple[VideoFamily, ...] = ()
"""Those that `comfy-tpu port new` wrote. docs/aten-operators.md tells of a family once it is in FAMILIES by name."""

FAMILIES: tuple[VideoFamily, ...] = (
    *(WAN21, WAN21_IMAGE, WAN21_FIRST_LAST, WAN22, WAN22_IMAGE, WAN22_5B),
    *(FLUX_DEV, FLUX_SCHNELL),
    *(FLUX2_DEV, FLUX2_KLEIN, FLUX2_KLEIN_BASE),
    *(HUNYUAN15, HUNYUAN15_IMAGE),
    LTX_VIDEO,
    *PORTED,
)


def family_of(index: Config, transformer: Config) -> VideoFamily:
    """By the model's model_index.json and the config.json of its transformer, empty where it has none."""
    for family in FAMILIES:
        if family.matches(index, transformer):
            return family
    known = ", ".join(f"{family.name} ({' or '.join(family.pipeline_classes)})" for family in FAMILIES)
    raise UnsupportedError(f"the model is a {index.get('_class_name')}; supported are {known}")
