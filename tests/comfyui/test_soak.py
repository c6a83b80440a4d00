"""A hundred prompts in one server, good, cancelled and failed ones mixed: it stays up, and nothing piles up."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.comfyui.checkout import Checkout
from tests.comfyui.client import ComfyClient, Prompt
from tests.comfyui.graphs import DECODER, SAMPLER, three_nodes, whole_pipeline
from tests.comfyui.server import ComfyServer, running
from tests.comfyui.test_hostile_nodes import problems, surrounded

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]

PROMPTS = 100
GROWTH = 100e6
"""Bytes of host memory, over all of them."""


@pytest.fixture(scope="module")
def server(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    with running(checkout, tmp_path_factory.mktemp("soak") / "base", packs=["probe", "hostile"]) as server:
        yield server


def good(client: ComfyClient, seed: int) -> None:
    client.succeed(three_nodes(seed=seed, steps=1 + seed % 2))


def good_in_one_node(client: ComfyClient, seed: int) -> None:
    client.succeed(whole_pipeline(seed=seed, steps=1))


def good_with_hostile_nodes(client: ComfyClient, seed: int) -> None:
    assert problems(client.succeed(surrounded(seed))) == {}


def with_previews(client: ComfyClient, seed: int) -> None:
    assert client.succeed(three_nodes(seed=seed), preview_method="latent2rgb").of("preview")


def cancelled(client: ComfyClient, seed: int) -> None:
    run = client.queue(three_nodes(seed=seed, steps=100))
    client.wait(run, lambda run: any("step 1/100" in text for text in run.texts(SAMPLER)), "the first step")
    client.interrupt()
    assert client.finish(run).outcome == "execution_interrupted"


def failed_at_ours(client: ComfyClient, seed: int) -> None:
    node, name = [(SAMPLER, "num_frames"), (DECODER, "fps")][seed % 2]
    prompt = three_nodes(seed=seed)
    prompt["foreign"] = {"class_type": "ProbeInteger", "inputs": {"value": 0}}
    prompt[node]["inputs"][name] = ["foreign", 0]
    assert f"{name}=0" in client.fail(prompt)["exception_message"]


def failed_at_another(client: ComfyClient, seed: int) -> None:
    how = ["error", "memory", "interrupt"][seed % 3]
    prompt: Prompt = three_nodes(seed=seed)
    prompt["raises"] = {"class_type": "HostileRaise", "inputs": {"value": [SAMPLER, 0], "how": how}}
    prompt[DECODER]["inputs"]["latents"] = ["raises", 0]
    assert client.run(prompt).outcome in ("execution_error", "execution_interrupted")


KINDS: list[Callable[[ComfyClient, int], None]] = [
    good,
    good,
    good_in_one_node,
    good_with_hostile_nodes,
    with_previews,
    cancelled,
    failed_at_ours,
    failed_at_another,
]


def level(client: ComfyClient) -> dict[str, int]:
    """After Free: what is left on the device and in the process."""
    client.empty_device()
    assert [device["weights_bytes"] for device in client.status()["devices"]] == [0]
    probe = client.get("/probe")
    return {"arrays": probe["arrays"], "device": probe["bytes"], "host": client.server.resident_bytes()}


def test_a_hundred_prompts(client: ComfyClient, record_property: Callable[[str, object], None], tmp_path: Path) -> None:
    for number in range(3 * len(KINDS)):
        KINDS[number % len(KINDS)](client, number)
    before = level(client)
    chosen = random.Random(2025)
    ran: Counter[str] = Counter()
    for number in range(PROMPTS):
        kind = chosen.choice(KINDS)
        kind(client, 1000 + number)
        ran[kind.__name__] += 1
    after = level(client)
    measured = {"before": before, "after": after, "prompts": dict(ran)}
    record_property("soak", json.dumps(measured))
    (tmp_path / "soak.json").write_text(json.dumps(measured), encoding="utf-8")
    assert set(ran) == {kind.__name__ for kind in KINDS}
    assert client.server.alive
    assert (after["arrays"], after["device"]) == (before["arrays"], before["device"])
    assert after["host"] - before["host"] < GROWTH, measured
    client.succeed(three_nodes(seed=5000))
