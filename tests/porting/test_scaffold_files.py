"""Where `port new` writes, and what it does not write."""

import json
from pathlib import Path

import pytest

from comfy_tpu.cli.main import main
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.porting.scaffold.checkout import Link, check_name, find_checkout, write
from comfy_tpu.porting.scaffold.edits import appended_to_tuple, inserted_before, sorted_into_list
from comfy_tpu.porting.scaffold.pipelines import find_source

ROOT = Path(__file__).parents[2]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["port", "new", *arguments, "--into", str(ROOT)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    {
        "no such class": (("mine", "--from", "NothingPipeline"), "has no pipeline NothingPipeline; give one such as"),
        "no pipeline": (("mine", "--from", "AutoencoderKL"), "has no pipeline AutoencoderKL"),
        "neither": (("mine", "--from", "a/b"), "--from=a/b is neither a model directory nor the name of a pipeline"),
        "supported": (("mine", "--from", "FluxPipeline"), "FluxPipeline is supported already, as Flux.1 dev"),
        "no transformer": (("mine", "--from", "StableDiffusionPipeline"), "has no transformer (it has vae, "),
        "another encoder": (
            ("mine", "--from", "SanaPipeline"),
            "the text_encoder of SanaPipeline is a Gemma2PreTrainedModel, for which there is no component",
        ),
        "another CLIP": (("mine", "--from", "StableDiffusion3Pipeline"), "is a CLIPTextModelWithProjection, for which"),
        "sizes": (("mine", "--from", "LattePipeline"), "no small LattePipeline could be made (TypeError: "),
        "taken": (
            ("wan", "--from", "PixArtSigmaPipeline"),
            "NAME=wan is taken: src/comfy_tpu/families/wan.py is there",
        ),
        "no name": (("Pix-Art", "--from", "PixArtSigmaPipeline"), "NAME='Pix-Art' is no name for a module"),
        "a keyword": (("class", "--from", "PixArtSigmaPipeline"), "NAME='class' is no name for a module"),
        "no id": (("mine", "--from", "PixArtSigmaPipeline", "--model-id", "x"), "--model-id=x is no id of the hub"),
    }.values(),
)
def test_refusals_are_one_sentence(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    *_, sentence = refused(capsys, *arguments).splitlines()  # before it the libraries may have logged something
    assert sentence.startswith("comfy-tpu: ")
    assert said in sentence


def test_a_directory_without_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="is no checkout of comfy-tpu, and a family is written into one"):
        find_checkout(str(tmp_path))
    assert find_checkout(str(ROOT)) == ROOT
    with pytest.raises(InvalidValueError, match="is taken"):
        check_name("flux", ROOT)


def test_a_model_directory_of_configurations_alone(tmp_path: Path) -> None:
    index = {"_class_name": "PixArtSigmaPipeline", "scheduler": ["diffusers", "DDIMScheduler"], "vae": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(
        '{"_class_name": "DDIMScheduler", "clip_sample": false}'
    )
    source = find_source(str(tmp_path))
    assert source.parts["scheduler"].__name__ == "DDIMScheduler"
    assert source.configs == {"scheduler": {"clip_sample": False}}
    assert (source.directory, source.hub_model) == (tmp_path, None)
    index["_name_or_path"] = "owner/model"
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert find_source(str(tmp_path)).hub_model == "owner/model"
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(InvalidValueError, match="is not JSON"):
        find_source(str(tmp_path))


def test_the_published_size_has_what_the_class_leaves_open() -> None:
    config = find_source("PixArtSigmaPipeline").full_config("transformer")
    assert (config["caption_channels"], config["use_additional_conditions"]) == (4096, False)
    assert find_source("CogVideoXPipeline").hub_model == "THUDM/CogVideoX-2b"


def test_lines_go_where_there_is_one_place() -> None:
    assert inserted_before("a\nb\n", "^b", "new\n", where="x.py") == "a\nnew\nb\n"
    with pytest.raises(UnsupportedError, match=r"x\.py has 2 places like '\^b', expected one to write before"):
        inserted_before("b\nb\n", "^b", "new\n", where="x.py")


@pytest.mark.parametrize(
    "text",
    [
        "X = ()\n",
        "X = (1,)\n",
        "X = (1, 2)\n",
        "X = (\n    1,\n    2,\n)\n",
        "X: tuple[int, ...] = (\n    1,\n    2\n)\n",
    ],
)
def test_tuples_grow(text: str) -> None:
    before: dict[str, tuple[int, ...]] = {}
    after: dict[str, tuple[int, ...]] = {}
    exec(text, before)
    exec(appended_to_tuple(text, "X", "9", where="x.py"), after)
    assert after["X"] == (*before["X"], 9)


def test_what_has_no_place_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="has no tuple Y to add to"):
        appended_to_tuple("X = ()\n", "Y", "9", where="x.py")
    assert sorted_into_list('X = ["a", "c"]\n', "X", "b", where="x.py") == 'X = [\n    "a",\n    "b",\n    "c",\n]\n'
    with pytest.raises(UnsupportedError, match="has no list Y to add to"):
        sorted_into_list("X = []\n", "Y", "b", where="x.py")


def test_all_files_or_none(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("before")
    write(tmp_path, {"old": "after", "new/file": b"1", "link": Link("new/file")})
    assert ((tmp_path / "old").read_text(), (tmp_path / "link").read_text()) == ("after", "1")
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path, {"old": "again", "another": "x", "directory": "cannot be a file"})
    assert (tmp_path / "old").read_text() == "after"
    assert not (tmp_path / "another").exists()
    assert not list(tmp_path.glob(".*"))
