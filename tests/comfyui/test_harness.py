"""The harness itself: a real server, stock nodes only, so that a failure elsewhere is not the harness's."""

import pytest

from tests.comfyui.checkout import Checkout
from tests.comfyui.client import ComfyClient, Prompt, RefusedError
from tests.comfyui.server import ComfyServer

pytestmark = pytest.mark.comfyui

IMAGE_PROMPT: Prompt = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 32, "height": 16, "batch_size": 3, "color": 0xFF0000}},
    "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}


def test_a_prompt_runs_and_its_images_come_back(client: ComfyClient) -> None:
    run = client.succeed(IMAGE_PROMPT)
    images = run.outputs("2")["images"]
    assert len(images) == 3
    assert client.view(images[0]).startswith(b"\x89PNG")
    assert client.history(run)["status"]["status_str"] == "success"


def test_a_wrong_value_is_refused_with_the_name_of_its_input(client: ComfyClient) -> None:
    prompt = {**IMAGE_PROMPT, "1": {"class_type": "EmptyImage", "inputs": {**IMAGE_PROMPT["1"]["inputs"], "width": 0}}}
    with pytest.raises(RefusedError) as refused:
        client.queue(prompt)
    assert refused.value.sentences("1") == ["Value 0 smaller than min of 1: width"]


def test_a_wait_that_cannot_end_shows_the_servers_log(client: ComfyClient) -> None:
    run = client.succeed(IMAGE_PROMPT)
    with pytest.raises(AssertionError, match=r"waited 0.01 s for the moon; .*(?s:.*)ComfyUI is running"):
        client.wait(run, lambda run: False, "the moon", 0.01)


def test_the_version_is_one_that_the_pack_supports(checkout: Checkout, server: ComfyServer) -> None:
    assert checkout.version >= (0, 7, 0)
    assert any(f"ComfyUI version: {'.'.join(map(str, checkout.version))}" in line for line in server.lines)
