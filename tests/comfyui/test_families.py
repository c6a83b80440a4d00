"""The examples of every family with a small random model each, one after the other in one server, twice.

Nobody unloads anything, and the devices hold the second time what they held the first time.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.comfyui.checkout import Checkout
from tests.comfyui.client import ComfyClient, Prompt
from tests.comfyui.family_models import RUNS, SIZE, family_prompt, write_models
from tests.comfyui.images import decode_video
from tests.comfyui.server import ComfyServer, running
from tests.comfyui.workflows import nodes_of
from tests.families.wan_pipelines import picture
from tools.demo_model import evaluate_image
from tools.demo_model.score import observe

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def family_server(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    base = tmp_path_factory.mktemp("families") / "base"
    write_models(base)
    with running(checkout, base, packs=["probe"]) as server:
        yield server


@pytest.fixture(scope="module")
def family_client(family_server: ComfyServer) -> Iterator[ComfyClient]:
    with ComfyClient(family_server) as client:
        yield client


def held(client: ComfyClient) -> dict[str, int]:
    return {entry["label"]: entry["bytes_per_device"] for entry in client.status()["resident"]}


def device_bytes(client: ComfyClient) -> int:
    """Of all arrays that JAX holds, whoever made them."""
    return int(client.get("/probe")["bytes"])


def test_families_take_turns_and_leave_nothing_behind(family_client: ComfyClient) -> None:
    rounds = []
    for number in range(2):
        for name, model in RUNS:
            prompt = family_prompt(name, model, family_client)
            for node in prompt.values():  # or ComfyUI would have everything of the second round in its cache
                if "seed" in node["inputs"]:
                    node["inputs"]["seed"] = number
            run = family_client.succeed(prompt)
            assert all(run.outputs(node)["images"] for node in nodes_of(prompt, "SaveVideo", "SaveImage"))
        rounds.append((held(family_client), device_bytes(family_client)))
    assert rounds[0] == rounds[1]
    assert any("transformer_2" in label for label in rounds[0][0]), "both of a pair stay"
    compiled = family_client.status()["compiled"]["programs"]
    for name, model in RUNS:
        family_client.succeed(family_prompt(name, model, family_client))
    assert family_client.status()["compiled"]["programs"] == compiled
    family_client.empty_device()
    assert held(family_client) == {}
    assert device_bytes(family_client) < 1e6


def test_the_demo_goes_on_from_an_image(family_client: ComfyClient) -> None:
    task = next(task for task in evaluate_image.tasks(50, 12, 2025) if task.wanted.motion == "up")
    content = io.BytesIO()
    task.image.save(content, "PNG")
    family_client.upload("first-frame.png", content.getvalue())
    prompt = family_prompt("wan21_tpu_image_to_video.json", "demo-image", family_client)
    (encoder,), (sampler,) = nodes_of(prompt, "Wan21TextEncoder"), nodes_of(prompt, "Wan21TPUSampler")
    (loader,), (saver,) = nodes_of(prompt, "LoadImage"), nodes_of(prompt, "SaveVideo")
    prompt[loader]["inputs"]["image"] = "first-frame.png"
    prompt[encoder]["inputs"] |= {"prompt": task.prompt, "negative_prompt": ""}
    prompt[sampler]["inputs"] |= {"num_inference_steps": 20, "guidance_scale": 3.0, "flow_shift": 3.0}
    (entry,) = family_client.succeed(prompt).outputs(saver)["images"]
    frames, _ = decode_video(family_client.view(entry))
    assert observe(frames).motion == "up"
    assert evaluate_image.first_frame_psnr(task.image, frames) >= evaluate_image.PSNR_MIN


def test_the_5b_from_an_image_and_without_one(family_client: ComfyClient) -> None:
    prompt = family_prompt("wan22_tpu_image_to_video.json", "small/5b", family_client)
    assert family_client.succeed(prompt)
    assert family_client.succeed(family_prompt("wan22_tpu_basic.json", "small/5b", family_client))


def test_an_image_for_a_model_that_takes_none(family_client: ComfyClient) -> None:
    prompt = family_prompt("wan22_tpu_image_to_video.json", "small/pair", family_client)
    error = family_client.fail(prompt)
    assert "begins with a prompt alone; leave it out" in error["exception_message"]


def test_a_model_of_another_family_is_not_offered(family_client: ComfyClient) -> None:
    info = family_client.object_info()
    assert "small/pair" in str(info["Wan22TPUSampler"]["input"]["required"]["model_id"])
    assert "small/pair" not in str(info["Wan21TPUSampler"]["input"]["required"]["model_id"])


def test_a_batch_of_images_is_refused(family_client: ComfyClient, tmp_path: Path) -> None:
    prompt = family_prompt("wan22_tpu_image_to_video.json", "small/pair-from-images", family_client)
    (encoder,) = nodes_of(prompt, "Wan22ImageEncoder")
    (loader,) = nodes_of(prompt, "LoadImage")
    prompt["twice"] = {"class_type": "RepeatImageBatch", "inputs": {"image": [loader, 0], "amount": 2}}
    prompt[encoder]["inputs"]["image"] = ["twice", 0]
    error = family_client.fail(prompt)
    assert "image holds 2 images of 70×50, expected one" in error["exception_message"]


def saved_image(client: ComfyClient, prompt: Prompt) -> bytes:
    (saver,) = nodes_of(prompt, "SaveImage")
    (entry,) = client.succeed(prompt).outputs(saver)["images"]
    with Image.open(io.BytesIO(client.view(entry))) as image:
        assert image.size == (SIZE["width"], SIZE["height"])
        return image.tobytes()


def with_references(prompt: Prompt, model: str) -> None:
    prompt["look"] = {"class_type": "LoadImage", "inputs": {"image": "reference.png"}}
    given = {"model_id": model, "image": ["look", 0], "image_2": ["look", 0]}
    prompt["seen"] = {"class_type": "Flux2ImageEncoder", "inputs": given}
    (sampler,) = nodes_of(prompt, "Flux2TPUSampler")
    prompt[sampler]["inputs"]["image_embeds"] = ["seen", 0]


@pytest.mark.parametrize("model", ["small/klein", "small/klein-base"])
def test_flux2_looks_at_images_and_one_node_draws_the_same_as_four(model: str, family_client: ComfyClient) -> None:
    content = io.BytesIO()
    picture(3, 100, 75).save(content, "PNG")
    family_client.upload("reference.png", content.getvalue())
    prompt = family_prompt("flux2_tpu_basic.json", model, family_client)
    without = saved_image(family_client, prompt)
    with_references(prompt, model)
    looked = saved_image(family_client, prompt)
    assert looked != without
    (encoder,), (sampler,) = nodes_of(prompt, "Flux2TextEncoder"), nodes_of(prompt, "Flux2TPUSampler")
    (decoder,), (saver,) = nodes_of(prompt, "Flux2TPUVAEDecoder"), nodes_of(prompt, "SaveImage")
    given = prompt[encoder]["inputs"] | prompt[sampler]["inputs"] | {"image": ["look", 0], "image_2": ["look", 0]}
    for name in ("prompt_embeds", "negative_prompt_embeds", "image_embeds"):
        del given[name]
    whole = {"look": prompt["look"], decoder: {"class_type": "Flux2TPUPipeline", "inputs": given}, saver: prompt[saver]}
    assert saved_image(family_client, whole) == looked


def test_only_klein_base_reads_the_negative_prompt(family_client: ComfyClient) -> None:
    drawn = {}
    for model in ("small/klein", "small/klein-base"):
        for negative in ("", "blue background"):
            prompt = family_prompt("flux2_tpu_basic.json", model, family_client)
            (encoder,) = nodes_of(prompt, "Flux2TextEncoder")
            prompt[encoder]["inputs"]["negative_prompt"] = negative
            drawn[model, negative] = saved_image(family_client, prompt)
    assert drawn["small/klein", ""] == drawn["small/klein", "blue background"]
    assert drawn["small/klein-base", ""] != drawn["small/klein-base", "blue background"]
