"""The pack as `comfy-tpu install` puts it into a ComfyUI from a built wheel: nothing comes from the checkout."""

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comfyui.checkout import ROOT, Checkout
from tests.comfyui.client import ComfyClient
from tests.comfyui.images import decode_video
from tests.comfyui.server import PACK, ComfyServer, running
from tests.comfyui.workflows import nodes_of, to_prompt
from tests.installed_wheel import Installed, build
from tools.demo_model import evaluate_image
from tools.demo_model.score import observe

pytestmark = pytest.mark.comfyui

USERS = (".git", "custom_nodes", "models", "input", "output", "user", "temp", "venv", ".venv")
"""Of a ComfyUI directory: what is not its own."""


@pytest.fixture(scope="module")
def installed(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment that borrows the other packages of ComfyUI's Python."""
    folder = tmp_path_factory.mktemp("wheel")
    return Installed(folder / "environment", build("wheel", folder), checkout.python)


@pytest.fixture(scope="module")
def server(checkout: Checkout, installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    folder = tmp_path_factory.mktemp("installed")
    comfyui = folder / "ComfyUI"
    shutil.copytree(checkout.path, comfyui, ignore=lambda place, _: USERS if Path(place) == checkout.path else ())
    done = installed.run("comfy-tpu", "install", comfyui, cwd=folder, XLA_FLAGS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("^✓ demo models +demo, demo-image$", done.stdout, re.MULTILINE), done.stdout
    placed = comfyui / "custom_nodes" / PACK
    assert placed.resolve() == installed.package / "_pack"
    arguments = {"packs": ["probe"], "pack": None, "environment": {"PYTHONPATH": ""}}
    with running(Checkout(comfyui, installed.python), comfyui, **arguments) as server:
        yield server


def test_files_are_those_of_the_wheel(client: ComfyClient, installed: Installed) -> None:
    assert client.get("/probe")["package"] == str(installed.package / "__init__.py")
    pack = installed.package / "_pack"
    scripts = [path for path in client.get("/extensions") if f"/{PACK}/" in path]
    assert {Path(path).name for path in scripts} == {path.name for path in (pack / "web").rglob("*.js")}
    served = {path: (pack / "web" / path.partition(f"/{PACK}/")[2]).read_bytes() for path in scripts}
    help_page = f"/extensions/{PACK}/docs/Wan21TPUSampler"
    served[f"{help_page}/zh.md"] = (pack / "web" / "docs" / "Wan21TPUSampler" / "zh.md").read_bytes()
    served[f"{help_page}.md"] = (pack / "web" / "docs" / "Wan21TPUSampler" / "en.md").read_bytes()
    templates = client.get("/workflow_templates")[PACK]
    assert set(templates) == {path.stem for path in (ROOT / "example_workflows").glob("*.json")}
    for name in templates:
        served[f"/api/workflow_templates/{PACK}/{name}.json"] = (
            pack / "example_workflows" / f"{name}.json"
        ).read_bytes()
        served[f"/api/workflow_templates/{PACK}/{name}.jpg"] = (pack / "example_workflows" / f"{name}.jpg").read_bytes()
    assert {path: client.request("GET", path).body for path in served} == served
    translated = client.get("/i18n")
    for language in ("en", "zh"):
        names = json.loads((pack / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
        assert {name: translated[language]["nodeDefs"].get(name) for name in names} == names


def test_demo_template_draws_what_it_says(client: ComfyClient) -> None:
    workflow = client.get(f"/api/workflow_templates/{PACK}/wan21_tpu_demo.json")
    prompt = to_prompt(workflow, client.object_info())
    (saver,) = nodes_of(prompt, "SaveVideo")
    (entry,) = client.succeed(prompt).outputs(saver)["images"]
    frames, rate = decode_video(client.view(entry))
    assert (frames.shape, rate) == ((17, 64, 64, 3), 8)
    seen = observe(frames)
    text = next(node["inputs"]["prompt"] for node in prompt.values() if node["inputs"].get("prompt"))
    assert f"{seen.colour} {seen.shape}" in text, (text, seen)


def test_image_template_goes_on_from_an_image(client: ComfyClient) -> None:
    """With demo-image, whose VAE and text encoder are the other demo model's."""
    task = next(task for task in evaluate_image.tasks(50, 12, 2025) if task.wanted.motion == "up")
    content = io.BytesIO()
    task.image.save(content, "PNG")
    client.upload("first-frame.png", content.getvalue())
    workflow = client.get(f"/api/workflow_templates/{PACK}/wan21_tpu_image_to_video.json")
    prompt = to_prompt(workflow, client.object_info())
    chosen = {"model_id": "demo-image", "num_frames": 17, "num_inference_steps": 20, "guidance_scale": 3.0}
    chosen |= {"flow_shift": 3.0, "image": "first-frame.png", "prompt": task.prompt, "negative_prompt": ""}
    for node in prompt.values():
        inputs = node["inputs"]
        inputs |= {
            name: value for name, value in chosen.items() if name in inputs and not isinstance(inputs[name], list)
        }
    (saver,) = nodes_of(prompt, "SaveVideo")
    (entry,) = client.succeed(prompt).outputs(saver)["images"]
    frames, _ = decode_video(client.view(entry))
    assert observe(frames).motion == "up"
    assert evaluate_image.first_frame_psnr(task.image, frames) >= evaluate_image.PSNR_MIN
