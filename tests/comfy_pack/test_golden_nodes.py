"""Saved workflows keep loading: node ids, inputs, defaults and outputs are those of `golden_nodes.json`.

The file is a record from before families became directories. A node may be added to it; an entry changes only where
saved workflows may break. Descriptions and tooltips are free.
"""

import json

import pytest

from tests.comfy_pack.loading import ROOT, load_pack

FREE = {"description", "tooltip"}
GOLDEN = json.loads((ROOT / "tests" / "comfy_pack" / "golden_nodes.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Without local models, which would be among the options of model_id."""
    return without_free_texts(load_pack(tmp_path_factory.mktemp("models"))["nodes"])


def without_free_texts(value):
    if isinstance(value, list):
        return [without_free_texts(each) for each in value]
    if isinstance(value, dict):
        return {key: without_free_texts(each) for key, each in value.items() if key not in FREE}
    return value


def test_every_node_of_the_record_and_no_other(nodes):
    assert sorted(nodes) == sorted(GOLDEN)


@pytest.mark.parametrize("node_id", GOLDEN)
def test_node_is_as_recorded(node_id, nodes):
    assert nodes[node_id] == GOLDEN[node_id]
