"""Saved workflows keep loading: node ids, inputs, defaults and outputs are those of `golden_nodes.json`.

`make pages` adds new nodes to the record; an entry changes only where saved workflows may break. Descriptions and
tooltips are free, and lists may get longer.
"""

import pytest

from tests.comfy_pack.loading import ROOT, load_pack
from tools.pages.node_record import PATH, extended_record, format_record, read_record, without_texts

RECORD = read_record(ROOT)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Without local models, which would be among the options of model_id."""
    return without_texts(load_pack(tmp_path_factory.mktemp("models"))["nodes"])


def with_recorded_options(node, recorded):
    """The node with those options of its inputs only that are recorded, in the order of the record."""
    options = {each["id"]: each["options"] for each in recorded["inputs"] if "options" in each}
    offered = [
        {**each, "options": [one for one in options.get(each["id"], ()) if one in each["options"]]}
        if "options" in each
        else each
        for each in node["inputs"]
    ]
    return {**node, "inputs": offered}


def test_every_node_of_the_record_and_no_other(nodes):
    assert sorted(nodes) == sorted(RECORD), "run `make pages`, which adds new nodes"


@pytest.mark.parametrize("node_id", RECORD)
def test_node_is_as_recorded(node_id, nodes):
    assert with_recorded_options(nodes[node_id], RECORD[node_id]) == RECORD[node_id]


def test_a_changed_default_and_a_lost_option_are_found():
    recorded = RECORD["TPUOptions"]
    (dtype,) = [each for each in recorded["inputs"] if each["id"] == "dtype"]
    for change, same in (({"default": "float32"}, False), ({"options": ["auto"]}, False)):
        assert (with_recorded_options(changed(recorded, dtype, change), recorded) == recorded) is same
    longer = changed(recorded, dtype, {"options": ["float64", *dtype["options"]]})
    assert with_recorded_options(longer, recorded) == recorded


def changed(node, given, change):
    return {**node, "inputs": [{**each, **change} if each is given else each for each in node["inputs"]]}


def test_new_nodes_are_added_and_recorded_ones_stay():
    recorded = (ROOT / PATH).read_text(encoding="utf-8")
    assert format_record(RECORD) == recorded
    node = {**RECORD["TPUOptions"], "description": "free"}
    text = extended_record(ROOT, {"Another": node, "TPUOptions": {**node, "category": "changed"}})
    assert format_record({**RECORD, "Another": RECORD["TPUOptions"]}) == text
