"""What building a module from its configuration has in common."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from comfy_tpu.errors import CheckpointError, UnsupportedError


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
