"""The published model that a directory or a file is a version of, as names and configurations tell."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from comfy_tpu.families.card import Config, ModelCard

_WITHOUT_MEANING = frozenset(("diffusers",))
"""Words of hub ids that files do not repeat."""


def find_exact(card: ModelCard, names: Iterable[str]) -> str:
    """The hub id that one of the names is, with or without its owner; "" for none."""
    said = {_last_part(name) for name in names}
    return next((hub_id for hub_id in card.published if _last_part(hub_id) in said), "")


def find_named(names: Iterable[str], hub_ids: Collection[str]) -> str:
    """The hub id whose words are in a name, of those in which it differs from the others: "wan2.1_i2v_480p_14B_fp16"
    is Wan2.1-I2V-14B-480P-Diffusers. "" where no name tells."""
    texts = [_squeeze(name) for name in names]
    words = {hub_id: _words(hub_id) for hub_id in hub_ids}
    common = frozenset.intersection(*words.values())
    counts = {
        hub_id: len(own - common)
        for hub_id, own in words.items()
        if any(all(word in text for word in own - common or own) for text in texts)
    }
    most = [hub_id for hub_id, count in counts.items() if count == max(counts.values())]
    return most[0] if len(most) == 1 else ""


def find_similar(card: ModelCard, names: Iterable[str], config: Config, shift: float | None) -> str:
    """The hub id of the published model that a model directory is a version of; "" where its transformer is none of
    theirs. `shift`: that of its scheduler, which tells where neither the configuration nor a name does."""
    similar = [hub_id for hub_id, published in card.published.items() if _agree(published, config)]
    if not similar:
        return ""
    by_shift = (hub_id for hub_id in similar if card.defaults_of(hub_id).flow_shift == shift)
    return find_named(names, similar) or next(by_shift, similar[0])


def _agree(published: Config, config: Config) -> bool:
    return all(_plain(config.get(name, value)) == _plain(value) for name, value in published.items())


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _words(hub_id: str) -> frozenset[str]:
    return frozenset(map(_squeeze, re.split("[-_]", _last_part(hub_id)))) - _WITHOUT_MEANING


def _last_part(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()


def _squeeze(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
