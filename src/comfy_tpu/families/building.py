"""What building a module from its configuration, and dividing it over a mesh, has in common."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from comfy_tpu.errors import CheckpointError, UnsupportedError
from comfy_tpu.parallel.rules import Rule, column, replicate, row

VISION_RULES: tuple[Rule, ...] = (
    column("encoder.layers.*.self_attn.[qkv]_proj.*"),
    row("encoder.layers.*.self_attn.out_proj.weight"),
    replicate("encoder.layers.*.self_attn.out_proj.bias"),
    column("encoder.layers.*.mlp.fc1.*"),
    row("encoder.layers.*.mlp.fc2.weight"),
    replicate("encoder.layers.*.mlp.fc2.bias"),
    replicate("encoder.layers.*.layer_norm[12].*"),
    replicate("embeddings.*"),
    replicate("post_layernorm.*"),
)
"""Of transformers' encoders of pictures: CLIP, SigLIP."""


def refuse_unknown_keys(model_class: type, config: Mapping[str, Any]) -> None:
    """diffusers would only log them, and build something other than what was trained."""
    if unknown := sorted(set(config) - set(inspect.signature(model_class).parameters)):
        raise UnsupportedError(
            f"the configuration of {model_class.__name__} has {', '.join(unknown)}, which this version of diffusers "
            "does not know: a newer model; try `pip install --upgrade diffusers`"
        )


def check_whole_numbers(config: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(config[name], int) or config[name] < 1:
            raise CheckpointError(
                f"the config.json of the transformer has {name}={config[name]!r}, expected a whole number; "
                "download the model again"
            )


def without_vision_prefix(name: str) -> str:
    """transformers before 5 put it before every name of such an encoder."""
    return name.removeprefix("vision_model.")
