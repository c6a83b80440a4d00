"""docs/comfyui.md has every node, input and choice, with the numbers of the nodes."""

import re

import pytest

from comfy_tpu.families.registry import family_cards
from tests.comfy_pack.loading import ROOT, load_pack
from tools.pages.facts import KINDS
from tools.pages.node_record import read_record
from tools.pages.range_table import BEGIN

PAGES = ("docs/comfyui.md", "docs/comfyui.zh-CN.md")
FIRST_KEY = "Wan21"
"""The nodes whose inputs have tables; the sections of other families say what differs."""
NOT_WRITTEN_OUT = {"model_id", "base_model", "preset"}
"""Choices that are in tables of their own."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Without those of an installed family, which is described elsewhere."""
    found = load_pack(tmp_path_factory.mktemp("models"))["nodes"]
    return {node_id: found[node_id] for node_id in read_record(ROOT)}


def sections(name):
    """(node ids of the heading, text) of every section."""
    parts = re.split(r"^##+ ", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [(re.findall(r"`([A-Z]\w+)`", part.splitlines()[0]), part) for part in parts]


def rows(text):
    """(names in the first cell, the other cells) of the tables."""
    for line in text.splitlines():
        first, *others = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| `") else [""]
        if names := re.findall(r"`([a-z_0-9]+)`", first):
            yield names, others


def is_family_node(node_id):
    keys = [nodes.key for card in family_cards() for nodes in card.node_sets]
    return any(node_id == f"{key}{kind}" for key in keys for kind in KINDS)


def described(name, node_id):
    """What the page says of a node: sections with its id in their headings; of a family's node also those of the
    first family, and the table of ranges."""
    return "\n".join(
        text
        for ids, text in sections(name)
        if node_id in ids
        or (is_family_node(node_id) and (BEGIN in text or any(each.startswith(FIRST_KEY) for each in ids)))
    )


@pytest.mark.parametrize("name", PAGES)
def test_the_guide_names_every_node_input_and_choice(name, nodes):
    headed = [node_id for ids, _ in sections(name) for node_id in ids]
    assert sorted(headed) == sorted(nodes), "each in the heading of one section"
    missing = []
    for node_id, node in nodes.items():
        text = described(name, node_id)
        for given in node["inputs"]:
            if f"`{given['id']}`" not in text:
                missing.append(f"{node_id}: {given['id']}")
            # Those of the lists that are not files and directories of this machine.
            options = () if given["id"] in NOT_WRITTEN_OUT else given.get("options", ())
            words = [option for option in options if re.fullmatch(r"[a-z0-9+-]+", option)]
            missing += [f"{node_id}: {given['id']} {word}" for word in words if word not in text]
    assert not missing, f"{name} has no word of {'; '.join(missing)}"


@pytest.mark.parametrize("name", PAGES)
def test_tables_of_the_guide_are_those_of_the_nodes(name, nodes):
    for ids, text in sections(name):
        table = list(rows(text))
        if len(ids) == 1 and table:
            assert [each for names, _ in table for each in names] == [each["id"] for each in nodes[ids[0]]["inputs"]]
        for names, cells in table if ids else ():
            for input_name in names:
                found = [each for node_id in ids for each in nodes[node_id]["inputs"] if each["id"] == input_name]
                assert found, f"{name}: {ids} have no {input_name}"
                assert any(agrees(each, *cells) for each in found), f"{name}: {input_name} of {ids} is {found[0]}"


def agrees(given, default, text):
    if isinstance(given.get("default"), bool):
        return True
    if given["type"] in ("INT", "FLOAT"):
        most = "2⁶⁴−1" if given["max"] == 2**64 - 1 else f"{given['max']:g}"
        return default == str(given["default"]) and f"{given['min']:g}–{most}" in text
    return default in ("as above", "同上") or str(given.get("default") or "") in default
