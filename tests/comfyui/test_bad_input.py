"""Bad input is refused with one sentence that names it, before anything is loaded for it, and leaves no file."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui.checkout import ROOT
from tests.comfyui.client import ComfyClient, Prompt, RefusedError
from tests.comfyui.graphs import DECODER, ENCODER, SAMPLER, three_nodes, whole_pipeline
from tests.comfyui.models import LARGE_MODEL, copy_demo
from tests.comfyui.server import ComfyServer

pytestmark = pytest.mark.comfyui

LONGEST = 450
"""Characters of a sentence that fits on a node."""

OWN = {ENCODER: "text_encoder", SAMPLER: "transformer", DECODER: "vae", "pipeline": ""}
"""What each node loads; the pipeline all of it."""


def refusal(client: ComfyClient, prompt: Prompt, node: str) -> str:
    """What ComfyUI's validation says of the node; nothing of the prompt has run."""
    with pytest.raises(RefusedError) as refused:
        client.queue(prompt)
    return " / ".join(refused.value.sentences(node))


def sentence(client: ComfyClient, prompt: Prompt, node: str) -> str:
    """What the node says when it runs. What stands before it in the workflow may have loaded its own."""
    before = client.status()["resident"]
    error = client.fail(prompt)
    assert error["node_id"] == node, error
    message: str = error["exception_message"].strip()
    assert message
    assert "\n" not in message, f"not one sentence: {message}"
    assert len(message) < LONGEST, message
    loaded = {entry["label"] for entry in client.status()["resident"] if entry not in before}
    assert not {label for label in loaded if label.endswith(OWN[node])}, f"loaded for it: {loaded}"
    assert client.status()["activity"]["stage"] == "idle"
    return message


def linked(prompt: Prompt, node: str, name: str, kind: str, **inputs: Any) -> Prompt:
    """The same with one input over a link, where no widget's range or list holds it."""
    changed = {key: {**value, "inputs": dict(value["inputs"])} for key, value in prompt.items()}
    changed["foreign"] = {"class_type": kind, "inputs": inputs}
    changed[node]["inputs"][name] = ["foreign", 0]
    return changed


@pytest.fixture(scope="module", autouse=True)
def empty_device(server: ComfyServer) -> None:
    with ComfyClient(server) as client:
        client.succeed(three_nodes())
        client.empty_device()


@pytest.fixture(autouse=True)
def no_file_elsewhere(server: ComfyServer) -> Iterator[None]:
    def listing() -> set[Path]:
        roots = [server.base, server.home, server.checkout.path, ROOT]
        found = {path for root in roots for path in root.rglob("*") if not path.is_symlink()}
        ours = ("__pycache__", ".git", ".pytest_cache", "build")
        return {path for path in found if not any(part in ours for part in path.parts)}

    before = listing()
    yield
    # ComfyUI's own folders for what a prompt shows.
    allowed = [server.base / name for name in ("output", "temp", "user")]
    new = {path for path in listing() - before if not any(path.is_relative_to(place) for place in allowed)}
    assert not new


# Frames, sizes and numbers


@pytest.mark.parametrize("frames", [18, 19, 20, 16, 15, 0, -3, 125, 10**9])
@pytest.mark.parametrize(("make", "node"), [(three_nodes, SAMPLER), (whole_pipeline, "pipeline")])
def test_frames_that_are_typed(client: ComfyClient, make: Callable[..., Prompt], node: str, frames: int) -> None:
    message = refusal(client, make(frames=frames), node)
    assert f"num_frames={frames} is " in message
    if 17 < frames < 121:
        assert "is not 4n+1; use 17 or 21" in message


@pytest.mark.parametrize("frames", [18, 20, 0, -3, 10**9])
@pytest.mark.parametrize(("make", "node"), [(three_nodes, SAMPLER), (whole_pipeline, "pipeline")])
def test_frames_over_a_link(client: ComfyClient, make: Callable[..., Prompt], node: str, frames: int) -> None:
    message = sentence(client, linked(make(), node, "num_frames", "ProbeInteger", value=frames), node)
    assert f"num_frames={frames}" in message


@pytest.mark.parametrize(("name", "value"), [("height", 100), ("height", 264), ("width", 0), ("width", 100_000)])
def test_sizes_over_a_link(client: ComfyClient, name: str, value: int) -> None:
    prompt = linked(three_nodes(model=LARGE_MODEL), SAMPLER, name, "ProbeInteger", value=value)
    assert f"{name}={value}" in sentence(client, prompt, SAMPLER)


def test_a_size_between_the_steps_of_the_widget(client: ComfyClient) -> None:
    """ComfyUI checks minimum and maximum, not the step."""
    assert "width=264" in sentence(client, three_nodes(model=LARGE_MODEL, width=264), SAMPLER)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("height", 255),
        ("width", 1281),
        ("num_inference_steps", 0),
        ("num_inference_steps", 101),
        ("guidance_scale", -0.1),
        ("guidance_scale", 20.1),
        ("seed", -1),
        ("seed", 2**64),
        ("flow_shift", 0.9),
        ("flow_shift", 10.1),
        ("height", "tall"),
        ("guidance_scale", "much"),
        ("scheduler", "ddim"),
        ("scheduler", "../unipc"),
    ],
)
def test_values_edited_by_hand(client: ComfyClient, name: str, value: Any) -> None:
    assert name in refusal(client, three_nodes(**{name: value}), SAMPLER)


@pytest.mark.parametrize("name", ["guidance_scale", "flow_shift"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_none_over_a_link(client: ComfyClient, name: str, value: str) -> None:
    prompt = linked(three_nodes(), SAMPLER, name, "ProbeNumber", value=value)
    assert f"{name}={value}" in sentence(client, prompt, SAMPLER)


@pytest.mark.parametrize(("name", "value"), [("num_inference_steps", 0), ("num_inference_steps", 10**6), ("seed", -1)])
def test_whole_numbers_over_a_link(client: ComfyClient, name: str, value: int) -> None:
    prompt = linked(three_nodes(), SAMPLER, name, "ProbeInteger", value=value)
    assert f"{name}={value}" in sentence(client, prompt, SAMPLER)


@pytest.mark.parametrize("name", ["num_frames", "num_inference_steps", "fps"])
def test_a_text_over_a_link_of_any_type(client: ComfyClient, name: str) -> None:
    nodes = [(three_nodes, DECODER if name == "fps" else SAMPLER), (whole_pipeline, "pipeline")]
    for make, node in nodes:
        message = sentence(client, linked(make(), node, name, "ProbeText", value="many"), node)
        assert message == f"{name}='many' is not a whole number"


def test_an_unknown_scheduler_over_a_link(client: ComfyClient) -> None:
    prompt = linked(three_nodes(), SAMPLER, "scheduler", "ProbeText", value="ddim")
    assert "scheduler='ddim' is unknown; choose from" in sentence(client, prompt, SAMPLER)


@pytest.mark.parametrize("fps", [0, -1, 10**6])
def test_a_frame_rate_over_a_link(client: ComfyClient, fps: int) -> None:
    assert f"fps={fps}" in sentence(client, linked(three_nodes(), DECODER, "fps", "ProbeInteger", value=fps), DECODER)


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_a_prompt_that_says_nothing(client: ComfyClient, text: str) -> None:
    assert "prompt - it is empty; say what" in refusal(client, three_nodes(text=text), ENCODER)
    over_a_link = linked(three_nodes(), ENCODER, "prompt", "ProbeText", value=text)
    assert f"prompt={text!r} is empty; say what" in sentence(client, over_a_link, ENCODER)
    # When it runs: ComfyUI would put the sentence on num_frames, too, which this node also has checked.
    assert f"prompt={text!r} is empty; say what" in sentence(client, whole_pipeline(text=text), "pipeline")


# Embeds and latents of other models


@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_embeds"])
@pytest.mark.parametrize(
    ("shape", "entries"),
    [
        ("1,512,4096", 1),
        ("1,77,768", 1),
        ("1,512,127", 1),
        ("2,512,128", 1),
        ("512,128", 1),
        ("1,512,128", 2),
        ("1,512,128", 0),
    ],
)
def test_embeds_of_another_model(client: ComfyClient, name: str, shape: str, entries: int) -> None:
    prompt = linked(three_nodes(), SAMPLER, name, "ProbeConditioning", shape=shape, entries=entries, fill="0")
    assert name in sentence(client, prompt, SAMPLER)


@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_embeds"])
def test_embeds_that_are_no_numbers(client: ComfyClient, name: str) -> None:
    prompt = linked(three_nodes(), SAMPLER, name, "ProbeConditioning", shape="1,512,128", entries=1, fill="nan")
    assert name in sentence(client, prompt, SAMPLER)


STEERING = [
    (
        "ConditioningSetArea",
        {"width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0},
        "comes with area, from Conditioning (Set Area), which is not read here",
    ),
    (
        "ConditioningSetTimestepRange",
        {"start": 0.2, "end": 1.0},
        "holds 1 prompts, none of them for step 1 of 2, expected one for each step",
    ),
    (
        "ConditioningSetAreaStrength",
        {"strength": 0.5},
        "comes with strength, from Conditioning (Set Area Strength), which is not read here",
    ),
]


@pytest.mark.parametrize(("kind", "inputs", "told"), STEERING, ids=[case[0] for case in STEERING])
def test_a_prompt_that_is_limited_is_refused_not_passed_over(
    client: ComfyClient, kind: str, inputs: dict[str, Any], told: str
) -> None:
    prompt = linked(three_nodes(), SAMPLER, "prompt_embeds", kind, conditioning=[ENCODER, 0], **inputs)
    assert f"prompt_embeds {told}" in sentence(client, prompt, SAMPLER)


def test_a_limit_that_is_none_is_no_limit(client: ComfyClient) -> None:
    whole = {"conditioning": [ENCODER, 0], "start": 0.0, "end": 1.0}
    client.succeed(linked(three_nodes(), SAMPLER, "prompt_embeds", "ConditioningSetTimestepRange", **whole))
    client.empty_device()


@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_embeds"])
def test_embeds_of_other_lengths_are_read(client: ComfyClient, name: str) -> None:
    """Not bad input: ComfyUI's encoders give as many tokens as they like."""
    for tokens in (77, 600):
        shape = f"1,{tokens},128"
        client.succeed(linked(three_nodes(), SAMPLER, name, "ProbeConditioning", shape=shape, entries=1, fill="0.1"))
    client.empty_device()


@pytest.mark.parametrize(
    "shape",
    [
        "1,4,8,8",
        "1,4,5,8,8",
        "1,48,5,8,8",
        "1,15,5,8,8",
        "16,8,8",
        "16,8",
        "16",
        "1,16,0,8,8",
        "1,16,5,7,9",
        "0,16,5,8,8",
    ],
)
def test_latents_of_another_model(client: ComfyClient, shape: str) -> None:
    prompt = linked(three_nodes(), DECODER, "latents", "ProbeLatent", shape=shape, fill="0")
    message = sentence(client, prompt, DECODER)
    assert "latents" in message
    assert "(" in message or "=" in message, "it does not say what it got"


@pytest.mark.parametrize("fill", ["nan", "inf"])
def test_latents_that_are_no_numbers(client: ComfyClient, fill: str) -> None:
    prompt = linked(three_nodes(), DECODER, "latents", "ProbeLatent", shape="1,16,5,8,8", fill=fill)
    assert "latents hold NaN or infinity" in sentence(client, prompt, DECODER)


def test_a_type_that_is_no_latent(client: ComfyClient) -> None:
    prompt = three_nodes()
    prompt[DECODER]["inputs"]["latents"] = [ENCODER, 0]
    assert "latents, received_type(CONDITIONING) mismatch" in refusal(client, prompt, DECODER)


@pytest.mark.parametrize("name", ["prompt_embeds", "latents"])
def test_a_foreign_node_that_gives_something_else_than_it_says(client: ComfyClient, name: str) -> None:
    node = SAMPLER if name == "prompt_embeds" else DECODER
    assert name in sentence(client, linked(three_nodes(), node, name, "ProbeText", value="surprise"), node)


# Models


UNKNOWN = [
    "no-such-model",
    "..",
    "../demo",
    "demo/../demo",
    "some-owner/../demo",
    "/etc",
    "/",
    "~",
    "",
    "Demo",
    "demo\0",
    "file:///etc/passwd",
    "owner/name",
    str(ROOT / "src" / "comfy_tpu" / "assets" / "demo"),
]


@pytest.mark.parametrize("model", UNKNOWN)
def test_models_that_are_not_in_the_list(client: ComfyClient, model: str) -> None:
    prompt = three_nodes(model=model)
    for node in (ENCODER, SAMPLER, DECODER):
        assert "Value not in list: model_id: '" in refusal(client, prompt, node)
    assert "model_id" in refusal(client, whole_pipeline(model=model), "pipeline")


@pytest.mark.parametrize("model", UNKNOWN)
def test_models_that_come_over_a_link(client: ComfyClient, model: str) -> None:
    prompt = linked(three_nodes(), ENCODER, "model_id", "ProbeText", value=model)
    message = sentence(client, prompt, ENCODER)
    assert message.startswith(f"model_id={model!r} is not a Wan 2.1 model that is known here; choose from ")


def test_a_hub_model_that_cannot_be_had(client: ComfyClient) -> None:
    """The server of the tests is offline."""
    name = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    message = sentence(client, three_nodes(model=name), ENCODER)
    assert name in message
    assert "hub" in message
    loading, ended = client.run(three_nodes(model=name)).texts(ENCODER)
    assert loading == "loading Wan 2.1 T2V 1.3B"
    assert re.fullmatch(r"failed after \d+\.\d s", ended)


def test_a_model_folder_that_went_away(client: ComfyClient, base: Path) -> None:
    directory = copy_demo(base, "gone")
    prompt = three_nodes(model="gone", seed=1)
    client.succeed(prompt)
    client.empty_device()
    shutil.rmtree(directory)
    assert "model_id: 'gone' not in" in refusal(client, prompt, SAMPLER)
    linked_prompt = linked(three_nodes(), ENCODER, "model_id", "ProbeText", value="gone")
    assert "model_id='gone' is not a Wan 2.1 model that is known here" in sentence(client, linked_prompt, ENCODER)


def lack_weights(directory: Path) -> None:
    (directory / "transformer" / "diffusion_pytorch_model.safetensors").unlink()


def cut_weights(directory: Path) -> None:
    path = directory / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def lack_a_component(directory: Path) -> None:
    shutil.rmtree(directory / "text_encoder")


def change_a_class(directory: Path) -> None:
    path = directory / "vae" / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace("AutoencoderKLWan", "AutoencoderKL"), encoding="utf-8")


def break_json(directory: Path) -> None:
    (directory / "transformer" / "config.json").write_text("{", encoding="utf-8")


def test_a_configuration_that_lacks_a_dimension(client: ComfyClient, base: Path) -> None:
    directory = copy_demo(base, "narrow")
    path = directory / "transformer" / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"text_dim"', '"_text_dim"'), encoding="utf-8")
    try:
        error = client.fail(three_nodes(model="narrow"))
    finally:
        shutil.rmtree(directory)
    assert error["node_id"] == ENCODER  # before anything is loaded
    message = error["exception_message"]
    assert message.startswith("model=narrow: checkpoint ")
    assert "linear_1.weight: shape (256, 128) in the file, expected (256, 4096)" in message
    assert "nothing was loaded; check that the checkpoint and the model's config belong together" in message


@pytest.mark.parametrize("damage", [lack_weights, cut_weights, lack_a_component, change_a_class, break_json])
def test_a_model_folder_that_is_damaged(client: ComfyClient, base: Path, damage: Callable[[Path], None]) -> None:
    name = damage.__name__
    directory = copy_demo(base, name)
    damage(directory)
    message = sentence(client, three_nodes(model=name), ENCODER)
    shutil.rmtree(directory)
    assert name in message


def test_a_node_that_does_not_exist_and_a_missing_input(client: ComfyClient) -> None:
    prompt = three_nodes()
    del prompt[SAMPLER]["inputs"]["flow_shift"]
    assert "Required input is missing: flow_shift" in refusal(client, prompt, SAMPLER)
    prompt = three_nodes()
    prompt[SAMPLER]["class_type"] = "Wan21TPUSamplerPlus"
    with pytest.raises(RefusedError, match="Wan21TPUSamplerPlus"):
        client.queue(prompt)


def test_after_all_that_a_good_prompt_works(client: ComfyClient) -> None:
    client.succeed(three_nodes(seed=99))
