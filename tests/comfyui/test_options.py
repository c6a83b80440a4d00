"""TPU Options in a real server: the mesh that it names, several videos, and its bad values."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.comfy_pack.neutral_options import NEUTRAL
from tests.comfyui.checkout import Checkout
from tests.comfyui.client import ComfyClient, Prompt
from tests.comfyui.graphs import DECODER, ENCODER, SAMPLER, keep, three_nodes
from tests.comfyui.images import read_kept
from tests.comfyui.server import ComfyServer, running
from tests.comfyui.workflows import FRAMES

pytestmark = pytest.mark.comfyui

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def eight_devices(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    base = tmp_path_factory.mktemp("options") / "base"
    with running(checkout, base, packs=["probe"], environment={"XLA_FLAGS": FLAGS}) as server:
        yield server


def with_options(**chosen: Any) -> Prompt:
    prompt = three_nodes(steps=1, seed=7)
    for node in (ENCODER, SAMPLER, DECODER):
        prompt[node]["inputs"]["options"] = ["options", 0]
    prompt["options"] = {"class_type": "TPUOptions", "inputs": {**NEUTRAL, **chosen}}
    return keep(prompt, frames=[DECODER, 0])


def test_two_videos_on_the_layout_of_the_options_and_back(eight_devices: ComfyServer) -> None:
    with ComfyClient(eight_devices) as client:
        client.succeed(with_options(mesh="dp=2,tp=4", num_videos=2))
        assert read_kept(eight_devices.base, "frames").shape[0] == 2 * FRAMES
        held = client.status()["resident"]
        client.succeed(with_options(mesh="single", attention_window="1x2x2:3x2x2"))
        assert read_kept(eight_devices.base, "frames").shape[0] == FRAMES
        assert all(entry in client.status()["resident"] for entry in held), "the first pipeline keeps its weights"


@pytest.mark.parametrize(
    ("node", "chosen", "sentence"),
    [
        ("options", {"mesh": "dp=2,xp=4"}, "unknown axis 'xp'"),
        ("options", {"attention_window": "wide"}, "attention_window='wide' is no window"),
        (ENCODER, {"mesh": "tp=16"}, "needs 16 devices but there are 8"),
    ],
)
def test_bad_values(eight_devices: ComfyServer, node: str, chosen: dict[str, str], sentence: str) -> None:
    with ComfyClient(eight_devices) as client:
        error = client.fail(with_options(**chosen))
    assert error["node_id"] == node
    assert sentence in error["exception_message"]
