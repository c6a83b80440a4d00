"""Every family of models, by the pipeline class that its model directories name."""

from __future__ import annotations

from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.family import VideoFamily
from comfy_tpu.families.wan import WAN21

FAMILIES: tuple[VideoFamily, ...] = (WAN21,)


def family_of(pipeline_class: str) -> VideoFamily:
    for family in FAMILIES:
        if pipeline_class in family.pipeline_classes:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.pipeline_classes)
    raise UnsupportedError(f"the model is a {pipeline_class}; supported are {known}")
