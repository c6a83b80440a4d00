"""What of a prompt is too long, said in its own words, also where a family's own function makes the tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.text import tokenize
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import small_flux2, small_hunyuan

TEMPLATES: dict[str, tuple[Callable[[], Path], int | None]] = {
    "hunyuan": (small_hunyuan.directory, 0),  # its template has tokens of its own
    "klein": (lambda: small_flux2.directory("klein"), 2),  # <start> user
    "dev": (lambda: small_flux2.directory("dev"), None),  # with a system message, and filled up on the left
}


def opened(name: str) -> tuple[ModelFiles, int]:
    """And how many tokens of its length the template takes before a prompt."""
    find, before = TEMPLATES[name]
    files = ModelFiles.open(find())
    if before is None:
        empty = tokenize(files, files.family.text.encoders[0], [""], 400)
        before = int(empty.inputs["attention_mask"].sum())
    return files, before


def cut(name: str, prompts: list[str], room: int) -> tuple[str, ...]:
    files, before = opened(name)
    return tokenize(files, files.family.text.encoders[0], prompts, before + room).cut


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_prompt_says_what_was_cut(name: str) -> None:
    prompts = ["a red circle moving LEFT, on a  Stranger thing", "a red circle", "red"]
    assert cut(name, prompts, 4) == ("LEFT, on a  Stranger thing", "", "")
    assert cut(name, prompts, 2) == ("circle moving LEFT, on a  Stranger thing", "circle", "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_whose_end_has_no_room_cuts_nothing_of_the_prompt(name: str) -> None:
    assert cut(name, ["a red circle moving"], 4) == ("",)


@pytest.mark.parametrize("name", ["klein", "dev"])
def test_a_template_that_has_no_room_itself_leaves_nothing_of_the_prompt(name: str) -> None:
    files, _ = opened(name)
    assert tokenize(files, files.family.text.encoders[0], ["a red circle"], 1).cut == ("a red circle",)


def test_an_encoder_of_a_few_words_cuts_what_the_other_one_reads() -> None:
    files, _ = opened("hunyuan")
    long = 'a circle that says "' + "red " * 100 + '"'
    assert tokenize(files, files.family.text.encoders[1], [long], 1000).cut == ("",)


@pytest.mark.default_cases("directory")
@pytest.mark.parametrize("directory", [small_hunyuan.directory, lambda: small_flux2.directory("base")])
def test_the_pipeline_hands_it_on_and_warns_of_the_negative_prompt(
    directory: Callable[[], Path], caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = VideoPipeline.open(directory(), RuntimeConfig(mesh="single"))
    settings = pipeline.settings(
        max_sequence_length=6, guidance_scale=4.0, negative_prompt="black black black black black black right"
    )
    with caplog.at_level("WARNING"):
        embeddings = pipeline.encode("a red circle moving left on background", settings)
    assert embeddings.cut.endswith("background")
    (warning,) = (record.message for record in caplog.records if "too long" in record.message)
    assert warning.startswith("negative_prompt is too long; this was cut:")
    assert warning.endswith("right")
