"""A model in single files on the command line."""

import pytest

from comfy_tpu.cli import main as cli
from comfy_tpu.cli import options
from comfy_tpu.config import SingleFiles
from comfy_tpu.errors import InvalidValueError

FILES = ["--transformer", "t", "--text-encoder", "e", "--vae", "v"]


def chosen(command, *given):
    return options.chosen_model(cli._parse([command, "x", *given]))


@pytest.mark.parametrize("command", ["generate", "encode"])
def test_without_files_it_is_the_named_model_or_the_default(command):
    assert chosen(command) == "demo"
    assert chosen(command, "--model", "mine") == "mine"


@pytest.mark.parametrize("command", ["denoise", "decode"])
def test_a_later_stage_has_no_default(command):
    assert chosen(command) is None


@pytest.mark.parametrize("command", ["generate", "encode", "denoise", "decode"])
def test_files_are_a_model(command, tmp_path):
    path = type(tmp_path)
    expected = SingleFiles((path("t"),), (path("e"),), path("v"))
    assert chosen(command, *FILES) == expected
    more = ["--transformer", "low", "--text-encoder", "f", "--image-encoder", "i", "--model", "demo"]
    assert chosen(command, *FILES, *more) == SingleFiles(
        (path("t"), path("low")), (path("e"), path("f")), path("v"), path("i"), "demo"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (FILES[:4], "vae is missing"),
        (FILES[2:], "transformer is missing"),
        ([*FILES[:2], *FILES[4:]], "text_encoder is missing"),
        ([*FILES, "--vae", "w"], "vae is given 2 times"),
    ],
)
def test_an_incomplete_model_is_refused(given, message):
    with pytest.raises(InvalidValueError, match=message):
        chosen("generate", *given)


def test_outputs_never_replace_the_files():
    arguments = cli._parse(["generate", "x", *FILES])
    assert [str(path) for path in options.list_input_files(arguments)] == ["t", "e", "v"]
