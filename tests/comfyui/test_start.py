"""A server that has just started: the pack is there, and neither jax nor torchax is."""

import re
from collections.abc import Iterator

import pytest

from tests.comfyui.checkout import Checkout
from tests.comfyui.client import ComfyClient
from tests.comfyui.graphs import three_nodes
from tests.comfyui.server import PACK, ComfyServer, running

pytestmark = pytest.mark.comfyui

HEAVY = {"jax", "jaxlib", "torchax", "diffusers"}
STOCK = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}},
    "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}


@pytest.fixture(scope="module")
def server(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    with running(checkout, tmp_path_factory.mktemp("fresh") / "base", packs=["probe"]) as server:
        yield server


def test_the_pack_is_imported_without_a_complaint(server: ComfyServer) -> None:
    found = re.search(rf" ([0-9.]+) seconds: .*{PACK}$", "\n".join(server.lines), re.MULTILINE)
    assert found is not None, server.tail()
    assert float(found[1]) < 0.5
    assert not [line for line in server.lines if PACK in line and re.search("fail|error|warn", line, re.IGNORECASE)]


def test_nothing_heavy_is_imported_until_a_node_runs(client: ComfyClient) -> None:
    """In this order: asking for the nodes and the status, a refused prompt, stock nodes and Free start nothing."""
    assert not HEAVY & set(client.get("/probe")["modules"])
    info = client.object_info()
    assert {"Wan21TextEncoder", "Wan21TPUSampler", "Wan21TPUVAEDecoder", "Wan21TPUPipeline", "TPUInfo"} <= set(info)
    status = client.status()
    assert (status["started"], status["platform"], status["devices"]) == (False, None, [])
    refused = client.request("POST", "/prompt", json_body={"prompt": three_nodes(frames=18), "client_id": client.id})
    assert refused.status == 400
    client.succeed(STOCK)
    client.free()
    assert not HEAVY & set(client.get("/probe")["modules"])
    client.succeed(three_nodes())
    assert {"jax", "torchax"} <= set(client.get("/probe")["modules"])
    assert client.status()["started"]
