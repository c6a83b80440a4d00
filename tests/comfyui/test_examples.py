"""Every example workflow, with the demo model in it, through the real server."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.comfyui.client import ComfyClient, Prompt, Run
from tests.comfyui.images import decode_video
from tests.comfyui.workflows import EXAMPLES, FRAMES, load_example, nodes_of, to_prompt, with_demo_model
from tools.demo_model.captions import Attributes
from tools.demo_model.score import observe

pytestmark = pytest.mark.comfyui

_ELSEWHERE = {"image", "server"}
NAMES = sorted(path.name for path in EXAMPLES.glob("wan21*.json") if not _ELSEWHERE & set(path.stem.split("_")))
"""Those of other families, and the one that begins with an image: test_families.py; the one with a server:
test_remote.py."""
RED_CIRCLE = Attributes("red", "circle", "right", "black")


def as_shipped(name: str, client: ComfyClient) -> Prompt:
    info, workflow = client.object_info(), load_example(name)
    foreign = {node["type"] for node in workflow["nodes"]} - set(info) - {"MarkdownNote", "Note"}
    if any(kind.startswith("VHS_") for kind in foreign):
        # tests/comfy_pack compares the template with a record of its nodes.
        pytest.skip("VideoHelperSuite is not in VHS_PATH or custom_nodes, or lacks its requirements")
    assert not foreign
    return to_prompt(workflow, info)


def example_prompt(name: str, client: ComfyClient) -> Prompt:
    return with_demo_model(as_shipped(name, client))


def videos(client: ComfyClient, run: Run, prompt: Prompt) -> Iterator[tuple[str, np.ndarray, float]]:
    for node in nodes_of(prompt, "SaveVideo", "VHS_VideoCombine"):
        output: dict[str, Any] = run.outputs(node)
        for entry in output.get("images") or output["gifs"]:
            yield node, *decode_video(client.view(entry))


def wanted_rate(prompt: Prompt) -> float:
    nodes = nodes_of(prompt, "Wan21TPUVAEDecoder", "Wan21TPUPipeline", "CreateVideo")
    rates = {
        float(prompt[node]["inputs"]["fps"]) for node in nodes if not isinstance(prompt[node]["inputs"]["fps"], list)
    }
    assert len(rates) == 1, f"one example, one frame rate: {rates}"
    return rates.pop()


def test_the_examples_that_the_readme_names_are_there() -> None:
    assert {
        "wan21_tpu_basic.json",
        "wan21_tpu_demo.json",
        "wan21_tpu_full_pipeline.json",
        "wan21_tpu_videohelpersuite.json",
        "wan21_tpu_native_vae.json",
        "wan21_native_tpu_vae.json",
        "wan21_native_tpu_model.json",
    } <= set(NAMES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.smoke] if name == "wan21_tpu_demo.json" else []) for name in NAMES],
)
def test_example_draws_a_red_circle_that_moves_right(name: str, client: ComfyClient) -> None:
    prompt = example_prompt(name, client)
    run = client.succeed(prompt)
    found = list(videos(client, run, prompt))
    assert found, "the example saves no video"
    for _, frames, rate in found:
        assert frames.shape == (FRAMES, 64, 64, 3)
        assert rate == wanted_rate(prompt)
        seen = observe(frames)
        assert all(seen.agrees(RED_CIRCLE).values()), seen
