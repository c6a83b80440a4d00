"""`src/comfy_tpu` names a family only in its directory and in the registry.

Identifiers and strings count; comments and docstrings do not, because measurements are cited there.
"""

import ast
import functools
import re

import pytest

from comfy_tpu.families.registry import BUILT_IN, family_cards
from tests.comfy_pack.loading import ROOT

PACKAGE = ROOT / "src" / "comfy_tpu"
REGISTRY = PACKAGE / "families" / "registry.py"
COMFYUI_NAMES = PACKAGE / "comfy" / "native"
"""Runs ComfyUI's own models, by ComfyUI's class and module names ("comfy.ldm.wan.vae", "Flux"): whether we have a
family of that name does not matter there."""

COMFYUI_NODES = re.compile("FluxGuidance|WanImageToVideo")
"""Nodes of ComfyUI that our messages name."""

CARDS = [card for card in family_cards() if card.package in BUILT_IN]


def files():
    exempt = [REGISTRY, COMFYUI_NAMES]
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(path == other or other in path.parents for other in exempt):
            yield path


def names(card):
    """What nobody writes without meaning the family."""
    found = {card.title, card.name}
    for nodes in card.node_sets:
        owners = {hub_id.split("/")[0] for hub_id in nodes.hub_models} - {"diffusers"}  # the library's own conversions
        found |= {nodes.key, nodes.name, *nodes.hub_models, *owners}
    for model in card.models:
        found |= {model.name, *model.pipeline_classes}
    return found if brand(card) else found - {card.title.partition("-")[0]}


def brand(card):
    """The first word of the title: Wan, Flux, Hunyuan, LTX. None where it is a letter, or also a language model that
    families share: Z-Image, Qwen-Image."""
    return None if card.title.endswith("-Image") else re.match(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", card.title)[0]


def pattern(card):
    """The names anywhere; the brand as a word of its own, also as a part of an identifier: wan_vae, WanVAE, WAN21."""
    whole = "|".join(re.escape(name) for name in sorted(names(card)) if len(name) > 3)
    word = brand(card)
    if word is None:
        return re.compile(rf"{whole}|{re.sub('[^a-z]', '[-_ ]?', card.title.lower())}", re.IGNORECASE)
    parts = rf"(?:{word}|{word.lower()}|{word.capitalize()})(?![a-z])|{word.upper()}(?![A-Za-z])"
    return re.compile(rf"{whole}|(?<![A-Za-z])(?:{parts})")


@functools.cache
def words(path):
    """(line, text) of every identifier, imported module and string but docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in described:
                found.append((node.lineno, COMFYUI_NODES.sub("", node.value)))
            continue
        for field in ("id", "attr", "name", "arg", "module", "asname"):
            if isinstance(value := getattr(node, field, None), str):
                found.append((getattr(node, "lineno", 0), value))
    return found


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_family_is_named_only_at_home(card):
    home, other = PACKAGE / "families" / card.name, pattern(card)
    # A family may speak of another: Flux.2's LoRA files have Flux.1's names. test_architecture forbids imports.
    homes = [PACKAGE / "families" / each.name for each in CARDS]
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {text[:80]!r}"
        for path in files()
        if not any(each in path.parents for each in homes)
        for line, text in words(path)
        if other.search(text)
    ]
    assert home.is_dir()
    assert not found, f"{card.title} is named outside families/{card.name}; read it from the card: {found}"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("x = 'for Wan 2.2 only'", True),
        ("def wan_vae(): ...", True),
        ("from a import WanVAE", True),
        ("x.WAN21", True),
        ("x = 'Wan-AI/Wan2.1-T2V-14B-Diffusers'", True),
        ("from comfy_tpu.families.wan import model", True),
        ("def f(wanted): 'Wan needs this'", False),
        ("x = 1  # Wan 14B: 4.6 s", False),
        ("x: int\n'''Wan has 40.'''", False),
        ("x = 'Swan, want'", False),
        ("x = 'unCLIPConditioning or WanImageToVideo'", False),
        ("_WANTED = 1", False),
    ],
)
def test_the_search_finds_what_it_should(source, is_found, tmp_path):
    path = tmp_path / "x.py"
    path.write_text(source)
    (wan,) = [card for card in CARDS if card.name == "wan"]
    assert any(pattern(wan).search(text) for _, text in words(path)) is is_found
