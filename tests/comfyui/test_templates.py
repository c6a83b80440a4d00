"""Every template, as it is shipped, in the real server: it takes all of them, and says what it lacks.

With a small model in it, each is run elsewhere: by families, with the demo model, through a server.
"""

from collections.abc import Iterator

import pytest

from tests.comfyui import test_examples
from tests.comfyui.checkout import Checkout
from tests.comfyui.client import ComfyClient, Prompt, RefusedError
from tests.comfyui.family_models import RUNS, write_inputs
from tests.comfyui.server import running
from tests.comfyui.workflows import EXAMPLES

pytestmark = pytest.mark.comfyui

TEMPLATES = sorted(path.name for path in EXAMPLES.glob("*.json"))
RUN_BY_FAMILIES = {name for name, _ in RUNS}
RUN_BY_A_SERVER = {"wan21_tpu_server.json"}
"""test_remote.py."""
FILES = ("unet_name", "clip_name", "vae_name")
"""Inputs of ComfyUI's own loaders, whose lists are of files that are there."""


@pytest.fixture(scope="module")
def template_client(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyClient]:
    """A server without models, but with the images and videos that templates load."""
    base = tmp_path_factory.mktemp("templates") / "base"
    write_inputs(base)
    with running(checkout, base) as server, ComfyClient(server) as client:
        yield client


def test_every_template_is_run_with_a_small_model() -> None:
    assert {*test_examples.NAMES, *RUN_BY_FAMILIES, *RUN_BY_A_SERVER} == set(TEMPLATES)


def model_of(prompt: Prompt) -> str:
    (model,) = {node["inputs"]["model_id"] for node in prompt.values() if "model_id" in node["inputs"]}
    return str(model)


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - RUN_BY_A_SERVER - {"wan21_tpu_demo.json"}))
def test_it_is_taken_and_says_what_is_missing(name: str, template_client: ComfyClient) -> None:
    prompt = test_examples.as_shipped(name, template_client)
    try:
        error = template_client.fail(prompt)["exception_message"]
    except RefusedError as refused:  # of ComfyUI's own loaders, by files alone; links, types and ranges are right
        errors = [error for node in refused.node_errors.values() for error in node["errors"]]
        assert {error["type"] for error in errors} == {"value_not_in_list"}
        assert {error["extra_info"]["input_name"] for error in errors} <= set(FILES)
        return
    assert model_of(prompt) in error, "one sentence that names the model"
