"""SPEC A1 to A5 with foreign nodes in the same workflow and the same process (packs/hostile)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.closeness import psnr
from tests.comfyui.checkout import Checkout
from tests.comfyui.client import ComfyClient, Prompt, Run
from tests.comfyui.graphs import DECODER, ENCODER, SAMPLER, keep, three_nodes
from tests.comfyui.images import read_kept
from tests.comfyui.native_weights import write_demo_transformer, write_demo_vae
from tests.comfyui.server import ComfyServer, running
from tests.comfyui.workflows import DEMO_TRANSFORMER, DEMO_VAE, FRAMES

pytestmark = pytest.mark.comfyui

TORCHAX_ERROR = "torchax Tensors can only do math within the torchax environment"


@pytest.fixture(scope="module")
def server(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    base = tmp_path_factory.mktemp("hostile") / "base"
    write_demo_vae(base / "models" / "vae" / DEMO_VAE)
    write_demo_transformer(base / "models" / "diffusion_models" / DEMO_TRANSFORMER)
    with running(checkout, base, packs=["probe", "native_demo", "hostile"]) as server:
        yield server
        assert not [line for line in server.lines if TORCHAX_ERROR in line]


def maths(value: list[Any], salt: int, **more: Any) -> dict[str, Any]:
    """`salt` makes ComfyUI run it again."""
    return {"class_type": "HostileMaths", "inputs": {"value": value, "salt": salt, **more}}


def surrounded(seed: int, **settings: Any) -> Prompt:
    """Foreign maths before, between and after ours: every value passes through a foreign node."""
    prompt = three_nodes(seed=seed, **settings)
    del prompt["frames"]
    prompt["words"] = {"class_type": "ProbeText", "inputs": {"value": prompt[ENCODER]["inputs"]["prompt"]}}
    prompt["before"] = maths(["words", 0], seed, first=True)
    prompt[ENCODER]["inputs"]["prompt"] = ["before", 0]
    prompt["between embeds"] = maths([ENCODER, 0], seed, also=[ENCODER, 1])
    prompt[SAMPLER]["inputs"]["prompt_embeds"] = ["between embeds", 0]
    prompt["between latents"] = maths([SAMPLER, 0], seed)
    prompt[DECODER]["inputs"]["latents"] = ["between latents", 0]
    prompt["after"] = maths([DECODER, 0], seed, also=[DECODER, 2])
    return keep(prompt, frames=["after", 0])


FOREIGN = ("before", "between embeds", "between latents", "after")


def problems(run: Run, nodes: tuple[str, ...] = FOREIGN) -> dict[str, list[str]]:
    reports = {node: run.outputs(node)["report"][0]["problems"] for node in nodes}
    return {node: found for node, found in reports.items() if found}


def test_torch_is_as_it_was_before_between_and_after(client: ComfyClient, base: Path) -> None:
    """The first prompt of the server: jax, torchax and diffusers are imported between two foreign nodes of it."""
    run = client.succeed(surrounded(1))
    assert problems(run) == {}
    assert read_kept(base, "frames").shape == (FRAMES, 64, 64, 3)


def test_rough_hands_change_nothing_in_the_video(client: ComfyClient, base: Path) -> None:
    client.succeed(surrounded(2))
    touched = read_kept(base, "frames")
    client.succeed(keep(three_nodes(seed=2), untouched=[DECODER, 0]))
    assert psnr(touched, read_kept(base, "untouched")) > 60


def test_a_model_of_comfyui_between_ours_is_managed_as_ever(client: ComfyClient, base: Path) -> None:
    """ComfyUI loads, moves and unloads its own model while ours are resident, and handles both in one list."""
    prompt = surrounded(3)
    prompt |= {
        "model": {"class_type": "NativeDemoModel", "inputs": {"unet_name": DEMO_TRANSFORMER}},
        "ksampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["model", 0],
                "positive": [ENCODER, 0],
                "negative": [ENCODER, 1],
                "latent_image": ["between latents", 0],
                "seed": 3,
                "steps": 2,
                "cfg": 3.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 0.5,
            },
        },
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": DEMO_VAE}},
        "native": {"class_type": "VAEDecode", "inputs": {"samples": ["ksampler", 0], "vae": ["vae", 0]}},
        "last": maths(["native", 0], 3),
    }
    run = client.succeed(prompt)
    found = [problem for part in problems(run, (*FOREIGN, "last")).values() for problem in part]
    assert set(found) <= {"the random numbers of torch were moved"}, "KSampler seeds them, and nothing else was changed"
    assert {entry["label"] for entry in client.status()["resident"]} >= {"demo transformer", "demo vae"}
    client.empty_device()


@pytest.mark.parametrize("how", ["error", "memory", "interrupt"])
@pytest.mark.parametrize("where", [ENCODER, SAMPLER, DECODER])
def test_a_foreign_node_that_fails_in_mid_workflow(client: ComfyClient, where: str, how: str) -> None:
    """Behind one of ours; the next prompt works, and torch is as it was."""
    seed = 100 + 10 * [ENCODER, SAMPLER, DECODER].index(where) + ["error", "memory", "interrupt"].index(how)
    prompt = three_nodes(seed=seed)
    prompt["raises"] = {"class_type": "HostileRaise", "inputs": {"value": [where, 0], "how": how}}
    following = {ENCODER: (SAMPLER, "prompt_embeds"), SAMPLER: (DECODER, "latents"), DECODER: ("frames", "images")}
    node, name = following[where]
    prompt[node]["inputs"][name] = ["raises", 0]
    run = client.run(prompt)
    assert run.outcome == ("execution_interrupted" if how == "interrupt" else "execution_error")
    assert problems(client.succeed(surrounded(seed))) == {}


def test_torch_is_as_it_was_after_ours_failed(client: ComfyClient) -> None:
    """Inside the sampler and inside the decoder, each with an error of its own."""
    for node, name, kind, value in (
        (SAMPLER, "num_frames", "ProbeInteger", 18),
        (SAMPLER, "guidance_scale", "ProbeNumber", "nan"),
        (DECODER, "fps", "ProbeInteger", 0),
    ):
        prompt = three_nodes(seed=200)
        prompt["foreign"] = {"class_type": kind, "inputs": {"value": value}}
        prompt[node]["inputs"][name] = ["foreign", 0]
        assert name in client.fail(prompt)["exception_message"]
        assert problems(client.succeed(surrounded(201))) == {}


def test_torch_is_as_it_was_after_ours_was_cancelled(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=300))
    run = client.queue(three_nodes(seed=301, steps=100))
    client.wait(run, lambda run: any("step 2/100" in text for text in run.texts(SAMPLER)), "the second step")
    client.interrupt()
    assert client.finish(run).outcome == "execution_interrupted"
    assert problems(client.succeed(surrounded(302))) == {}


def test_a_foreign_thread_computes_while_ours_run(client: ComfyClient) -> None:
    """From before the weights are loaded and the programs traced until the frames are there."""
    client.empty_device()
    prompt = surrounded(400, steps=10, frames=33)  # a size that nothing else here has: it is traced meanwhile
    prompt["start"] = {"class_type": "HostileThreadStart", "inputs": {"value": ["words", 0]}}
    prompt["before"]["inputs"]["value"] = ["start", 0]
    prompt["stop"] = {"class_type": "HostileThreadStop", "inputs": {"value": ["after", 0]}}
    run = client.succeed(prompt)
    (report,) = run.outputs("stop")["report"]
    assert report["problems"] == []
    assert report["rounds"] > 10, "it hardly ran"
    assert problems(run) == {}


def test_a_foreign_thread_goes_on_while_ours_fails(client: ComfyClient) -> None:
    prompt = surrounded(500, steps=100)
    prompt["start"] = {"class_type": "HostileThreadStart", "inputs": {"value": ["words", 0]}}
    prompt["before"]["inputs"]["value"] = ["start", 0]
    run = client.queue(prompt)
    client.wait(run, lambda run: any("step 2/100" in text for text in run.texts(SAMPLER)), "the second step")
    client.interrupt()
    client.finish(run)
    stop = client.succeed(
        {
            "words": {"class_type": "ProbeText", "inputs": {"value": "x"}},
            "stop": {"class_type": "HostileThreadStop", "inputs": {"value": ["words", 0]}},
        }
    )
    assert stop.outputs("stop")["report"][0]["problems"] == []
