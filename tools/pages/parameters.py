"""The parameters of every published model, by component: comfy_tpu/hub/parameters.json, from which sizes follow.

Counted in the classes of diffusers and transformers as their repositories have them, with their published
configurations, on torch's meta device: whole text encoders, also where the families load fewer layers. Nothing is
downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from comfy_tpu.families.card import Config
from comfy_tpu.hub.sizes import BFLOAT16_BYTES, PARAMETERS

if TYPE_CHECKING:
    from comfy_tpu.compiler.component import ComponentSpec


def format_size(parameters: Mapping[str, int]) -> str:
    """The size of a model's files, if all of them are bfloat16."""
    gigabytes = sum(parameters.values()) * BFLOAT16_BYTES / 1e9
    return f"{gigabytes:.0f} GB" if gigabytes >= 9.5 else f"{gigabytes:.1f} GB"


def count_parameters(hub_id: str) -> dict[str, int]:
    """By component; a second transformer is one of its own."""
    from comfy_tpu.bench.models import find_bench_model

    model = find_bench_model(hub_id)
    return {spec.name: _count(spec, model.config(spec)) for spec in model.family.components}


def _count(spec: ComponentSpec, config: Config) -> int:
    """Of a module of the first of the classes that is installed; of the family's own where none is public."""
    import copy

    import diffusers
    import torch
    import transformers

    public = [name for name in spec.classes if hasattr(diffusers, name) or hasattr(transformers, name)]
    name = next(iter(public), "")
    with torch.device("meta"):
        if not public:
            module = spec.build(config)
        elif hasattr(diffusers, name):
            module = getattr(diffusers, name)(**config)
        else:
            module_class = getattr(transformers, name)
            module = module_class(module_class.config_class(**copy.deepcopy(dict(config))))
    return sum(parameter.numel() for parameter in module.parameters())


def published_ids() -> list[str]:
    """Of families with a reference.py, which has the published configurations of VAEs and text encoders."""
    from tools.pages.generated import built_in_cards

    cards = [card for card in built_in_cards() if importlib.util.find_spec(f"{card.package}.reference") is not None]
    return [hub_id for card in cards for model in card.models for hub_id in model.published]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    counted = {hub_id: count_parameters(hub_id) for hub_id in published_ids()}
    text = json.dumps(counted, indent=2) + "\n"
    if not PARAMETERS.is_file() or PARAMETERS.read_text(encoding="utf-8") != text:
        PARAMETERS.write_text(text, encoding="utf-8")
        logging.getLogger("tools.pages").info("wrote %s", PARAMETERS.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
