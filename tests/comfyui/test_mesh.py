"""The nodes on eight devices, as on a v6e-8: the same video, the weights on all of them, and all of them emptied."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.closeness import psnr
from tests.comfyui.checkout import Checkout
from tests.comfyui.client import ComfyClient
from tests.comfyui.graphs import DECODER, keep, three_nodes
from tests.comfyui.images import read_kept
from tests.comfyui.server import ComfyServer, running

pytestmark = pytest.mark.comfyui

# As in tests/conftest.py; optimising takes longer than these programs run.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def eight_devices(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    base = tmp_path_factory.mktemp("mesh") / "base"
    with running(checkout, base, packs=["probe"], environment={"XLA_FLAGS": FLAGS}) as server:
        yield server


def test_eight_devices_draw_the_same_video(client: ComfyClient, base: Path, eight_devices: ComfyServer) -> None:
    prompt = keep(three_nodes(steps=5, seed=7), frames=[DECODER, 0])
    client.succeed(prompt)
    with ComfyClient(eight_devices) as other:
        other.succeed(prompt)
        assert psnr(read_kept(base, "frames"), read_kept(eight_devices.base, "frames")) >= 40
        status = other.status()
        assert [device["id"] for device in status["devices"]] == list(range(8))
        shares = [device["weights_bytes"] for device in status["devices"]]
        (whole,) = [device["weights_bytes"] for device in client.status()["devices"]]
        assert all(0 < share < whole for share in shares), "every device holds a part, none holds all"
        info = other.succeed({"info": {"class_type": "TPUInfo", "inputs": {}}}).outputs("info")["text"][0]
        assert info.startswith("8 cpu devices")
        other.empty_device()
        assert [device["weights_bytes"] for device in other.status()["devices"]] == [0] * 8
        assert other.get("/probe")["bytes"] < 1e6
