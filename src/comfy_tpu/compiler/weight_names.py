"""The names of a directory's weight files: what belongs together, and which of several forms is meant.

diffusers and transformers write a variant at different places: model.fp16.safetensors.index.json,
model.safetensors.index.fp16.json, model.safetensors.fp16.index.json.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from comfy_tpu.errors import CheckpointError

INDEX_NAME = re.compile(r"(?P<stem>.+)\.safetensors(?P<before>\.\w+)?\.index(?P<after>\.\w+)?\.json")
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
SUFFIX = ".safetensors"


@dataclasses.dataclass
class WeightFiles:
    """What a directory holds under one name: an index, or files without one."""

    index: str | None = None
    files: list[str] = dataclasses.field(default_factory=list)


def group_weights(names: Iterable[str]) -> dict[tuple[str, str | None], WeightFiles]:
    """The files of a directory by name and variant; other files are left out."""
    groups: dict[tuple[str, str | None], WeightFiles] = {}
    for name in sorted(names):
        if match := INDEX_NAME.fullmatch(name):
            key = _name_and_variant(match["stem"], match["before"] or match["after"])
            groups.setdefault(key, WeightFiles()).index = name
        elif name.endswith(SUFFIX):
            shard = SHARD_NAME.fullmatch(name.removesuffix(SUFFIX))
            key = _name_and_variant(shard["stem"] if shard else name.removesuffix(SUFFIX), None)
            groups.setdefault(key, WeightFiles()).files.append(name)
    return groups


def choose_weights(
    groups: dict[tuple[str, str | None], WeightFiles], variant: str | None, where: str
) -> Sequence[WeightFiles]:
    """The groups of a variant; without one, those that are not another form of another group."""
    if variant is None:
        # "a.fp16" beside "a" is the same model in another form; without an "a", the dot is just part of a name.
        plain = {name for name, found in groups if found is None}
        return [groups[key] for key in groups if key[1] is None or key[0] not in plain]
    chosen = [group for (_, found), group in groups.items() if found == variant]
    if not chosen:
        variants = sorted({found for _, found in groups if found}) or ["none"]
        raise CheckpointError(f"{where} has no variant {variant!r}; its variants: {', '.join(variants)}")
    return chosen


def _name_and_variant(stem: str, variant: str | None) -> tuple[str, str | None]:
    if variant:
        return stem, variant.removeprefix(".")
    head, dot, tail = stem.rpartition(".")
    return (head, tail) if dot else (stem, None)
