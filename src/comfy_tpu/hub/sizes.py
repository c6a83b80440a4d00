"""Sizes of published models, from the number of their parameters. Nothing is asked of the hub."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Mapping
from pathlib import Path

from comfy_tpu.families.registry import family_cards

PARAMETERS = Path(__file__).with_name("parameters.json")
"""Parameters of every published model, by component; `make pages` counts them."""

BFLOAT16_BYTES, FLOAT32_BYTES = 2, 4


@functools.cache
def read_parameters(path: Path = PARAMETERS) -> Mapping[str, Mapping[str, int]]:
    """Hub id -> component -> number of parameters."""
    counted: Mapping[str, Mapping[str, int]] = json.loads(path.read_text(encoding="utf-8"))
    return counted


def download_bytes(hub_id: str) -> int | None:
    """The bytes of a repository's weights, in the precision in which it has them; None for a model that is not
    known."""
    parameters = read_parameters().get(hub_id)
    if parameters is None:
        return None
    in_float32 = [glob for card in family_cards() for glob in card.float32_repositories]
    width = FLOAT32_BYTES if any(fnmatch.fnmatchcase(hub_id, glob) for glob in in_float32) else BFLOAT16_BYTES
    return width * sum(parameters.values())


def format_bytes(count: int) -> str:
    """ "79 GB", "1.4 GB", "25 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.95 * size:
            return f"{count / size:.0f} {unit}" if count >= 9.95 * size else f"{count / size:.1f} {unit}"
    return f"{count} B"
