"""The one route of the pack: reads only, answers only on the server's own address, tells no path."""

import json
from pathlib import Path

import pytest

from tests.comfyui.client import ComfyClient
from tests.comfyui.graphs import three_nodes
from tests.comfyui.server import ComfyServer

pytestmark = pytest.mark.comfyui

STATUS = "/comfy_tpu/status"
SHAPE = {
    "schema": int,
    "started": bool,
    "platform": str,
    "devices": list,
    "resident": list,
    "activity": dict,
    "step_seconds": float,
    "eta_seconds": float | None,
    "compiled": dict,
    "fallbacks": list,
}


@pytest.fixture(scope="module", autouse=True)
def something_ran(server: ComfyServer) -> None:
    with ComfyClient(server) as client:
        client.succeed(three_nodes(seed=1))


def test_it_has_the_documented_shape(client: ComfyClient) -> None:
    document = client.status()
    assert list(document) == list(SHAPE)
    for name, kind in SHAPE.items():
        assert isinstance(document[name], kind), name
    assert document["schema"] == 1
    (device,) = document["devices"]
    assert {name: type(value).__name__ for name, value in device.items()} == {
        "id": "int",
        "kind": "str",
        "weights_bytes": "int",
        "used_bytes": "NoneType",  # a CPU counts nothing
        "limit_bytes": "NoneType",
    }
    assert sum(entry["bytes_per_device"] for entry in document["resident"]) == device["weights_bytes"] > 0
    assert set(document["resident"][0]) == {"label", "model", "part", "bytes_per_device", "in_use", "sharding"}
    sharding = document["resident"][0]["sharding"]
    assert set(sharding) == {"mesh", "sharded", "gathered", "replicated", "total", "could_not_split"}
    assert sharding["total"]["bytes_per_device"] == document["resident"][0]["bytes_per_device"]
    nothing = dict.fromkeys(("what", "model", "part", "size"), "")
    assert document["activity"] == {"stage": "idle", **nothing, "done": 0, "total": 0, "node": None}
    assert set(document["compiled"]) == {"programs", "from_cache", "seconds", "last", "latest"}


@pytest.mark.parametrize("path", [STATUS, f"/api{STATUS}"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_only_get(client: ComfyClient, method: str, path: str) -> None:
    before = client.status()
    assert client.request(method, path, json_body={"resident": []}).status == 405
    assert client.status() == before


def test_a_get_changes_nothing(client: ComfyClient, base: Path) -> None:
    before, files = client.status(), sorted(base.rglob("*"))
    for _ in range(20):
        assert client.status() == before
    assert client.request("GET", f"{STATUS}?free=1&path=../../etc/passwd").json() == before
    assert sorted(base.rglob("*")) == files


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8188",
        "192.0.2.1",
        "127.0.0.1.evil.example",
        "[2001:db8::1]:80",
        "a:b",
        "127.0.0.1:99999",
    ],
)
def test_a_foreign_name_is_refused_without_a_word_of_the_devices(client: ComfyClient, host: str) -> None:
    for path in (STATUS, f"/api{STATUS}"):
        reply = client.request("GET", path, headers={"Host": host})
        assert reply.status == 403
        assert b"weights_bytes" not in reply.body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "127.0.0.2"])
def test_its_own_names_are_answered(client: ComfyClient, server: ComfyServer, host: str) -> None:
    assert client.request("GET", STATUS, headers={"Host": f"{host}:{server.port}"}).status == 200


def test_another_pages_script_cannot_read_it(client: ComfyClient, server: ComfyServer) -> None:
    """ComfyUI's own guard: a page of another origin."""
    headers = {"Host": f"127.0.0.1:{server.port}", "Origin": "http://evil.example"}
    reply = client.request("GET", STATUS, headers=headers)
    assert reply.status == 403
    assert "Access-Control-Allow-Origin" not in reply.headers


def test_no_path_of_the_host(client: ComfyClient, server: ComfyServer) -> None:
    text = json.dumps(client.status())
    info = json.dumps(client.object_info()["Wan21TPUSampler"])
    for content in (text, info):
        for path in (
            server.base,
            server.home,
            server.checkout.path,
            Path(__file__).parents[2],
            Path("/tmp"),
            Path.home(),
        ):
            assert str(path) not in content


def test_the_event_carries_the_same(client: ComfyClient) -> None:
    run = client.succeed(three_nodes(seed=2, steps=20))
    events = [message.data for message in client.messages if message.kind == "comfy_tpu.status"]
    assert all(list(event) == list(SHAPE) for event in events)
    stages = [event["activity"]["stage"] for event in events]
    assert "denoising" in stages
    assert stages[-1] == "idle"
    assert run.finished


def test_another_browser_gets_the_panel_but_not_the_texts_of_the_run(client: ComfyClient, server: ComfyServer) -> None:
    with ComfyClient(server) as other:
        client.succeed(three_nodes(seed=4), preview_method="latent2rgb")
        client.eventually(
            lambda: any(m.kind == "comfy_tpu.status" for m in list(other.messages)), "a status for the other"
        )
        assert {message.kind for message in other.messages} <= {"status", "feature_flags", "comfy_tpu.status"}


def test_a_run_shows_its_node_step_and_time_left(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=3, steps=30))
    events = [message.data for message in client.messages if message.kind == "comfy_tpu.status"]
    under_way = [event for event in events if event["activity"]["stage"] == "denoising" and event["activity"]["done"]]
    assert under_way
    for event in under_way:
        activity = event["activity"]
        assert (activity["node"], activity["what"], activity["total"]) == ("sampler", "64×64×17", 30)
        assert event["step_seconds"] > 0
        left = event["step_seconds"] * (30 - activity["done"])
        assert event["eta_seconds"] == pytest.approx(left)
        assert any(entry["in_use"] and entry["label"] == "demo transformer" for entry in event["resident"])
