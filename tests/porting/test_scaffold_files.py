"""Where `port new` writes, and what it does not write."""

import json
import os
import re
import types
from pathlib import Path
from typing import Any

import pytest
from comfy_tpu.porting.scaffold.checkout import Link, check_name, check_writable, find_checkout, write
from comfy_tpu.porting.scaffold.edits import appended_to_tuple, inserted_before, sorted_into_list
from comfy_tpu.porting.scaffold.writing import check_places

from comfy_tpu.cli.main import main
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.porting.scaffold import nodes
from comfy_tpu.porting.scaffold.pipelines import find_source, is_hub_id

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
        "a picture": (
            ("mine", "--from", "CogVideoXImageToVideoPipeline"),
            "cannot be called without image, and `port new` knows only pipelines that make a picture or a video from a "
            "prompt alone",
        ),
        "a control": (
            ("mine", "--from", "CogVideoXFunControlPipeline"),
            "has no attribute 'size'); it may want control_video, and `port new` knows only",
        ),
        "an optional transformer": (
            ("mine", "--from", "WanVACEPipeline", "--model-id", "a/b"),
            "no small WanVACEPipeline could be made (ValueError: VACE layers",
        ),
        "taken": (
            ("wan", "--from", "PixArtSigmaPipeline"),
            "NAME=wan is taken: src/comfy_tpu/families/wan.py is there",
        ),
        "no name": (("Pix-Art", "--from", "PixArtSigmaPipeline"), "NAME='Pix-Art' is no name for a module"),
        "a keyword": (("class", "--from", "PixArtSigmaPipeline"), "NAME='class' is no name for a module"),
        "a path": (("mine", "--from", "PixArtSigmaPipeline", "--model-id", "../.."), "--model-id=../.. is no id of"),
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


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "a family's constant": ("ltx_video", "LTX_VIDEO is a name in src/comfy_tpu/families/registry.py"),
        "the list of them": ("families", "FAMILIES is a name in src/comfy_tpu/families/registry.py"),
        "a family of nodes": ("hunyuan", "families/hunyuan.py is there"),
        "a constant of theirs": ("demo_model", "DEMO_MODEL is a name in src/comfy_tpu/comfy/node_families.py"),
        "the list of those": ("node_families", "NODE_FAMILIES is a name in src/comfy_tpu/comfy/node_families.py"),
        **{
            name: (name, f"{name.upper()} is something else in every family's file or test")
            for name in ("transformer", "vae", "scheduler", "published", "same", "chosen", "own")
        },
        "longest": ("a" * 40, None),
        "too long": ("a" * 300, "has 300 letters; use 40 at most"),
    }.values(),
)
def test_names_that_mean_something_already(name: str, said: str | None) -> None:
    if said is None:
        check_name(name, ROOT)
        return
    with pytest.raises(InvalidValueError, match=re.escape(said)):
        check_name(name, ROOT)


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


def test_ids_of_the_hub() -> None:
    for text in ("fal/AuraFlow", "THUDM/CogVideoX-2b", "0x/a.b_c-d"):
        assert is_hub_id(text)
    for text in ("../..", "./model", "a/.b", "a/b/c", "owner", "/b", "a/", "-a/b", "é/b", "a/模型", "a/b\n", "a /b"):
        assert not is_hub_id(text), text


def test_the_published_size_has_what_the_class_leaves_open() -> None:
    config = find_source("PixArtSigmaPipeline").full_config("transformer")
    assert (config["caption_channels"], config["use_additional_conditions"]) == (4096, False)
    assert find_source("CogVideoXPipeline").hub_model == "THUDM/CogVideoX-2b"


def test_steps_of_a_size_meet_its_multiples() -> None:
    """A widget's values are min % step + n * step."""
    inputs = (ROOT / "src/comfy_tpu/comfy/inputs.py").read_text(encoding="utf-8")
    assert f"SIZE_MIN, FRAMES_MIN = {nodes.SIZE_MIN}, " in inputs
    for multiple in (8, 16, 32, 64):
        facts: Any = types.SimpleNamespace(size_multiple=multiple, title="Mine")
        step = nodes.size_step(facts)
        assert step >= 16
        assert (nodes.SIZE_MIN % step + 3 * step) % multiple == 0
    odd: Any = types.SimpleNamespace(size_multiple=12, title="Mine")
    with pytest.raises(
        UnsupportedError, match="sizes of Mine are multiples of 12, and the smallest of a node, 256, is"
    ):
        nodes.size_step(odd)


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
    with pytest.raises(
        InvalidValueError, match=r"directory cannot be written \(is there already\); everything is as it"
    ):
        write(tmp_path, {"old": "again", "another": "x", "deep/er/file": "x", "directory": "cannot be a file"})
    assert (tmp_path / "old").read_text() == "after"
    assert not (tmp_path / "another").exists()
    assert not (tmp_path / "deep").exists(), "directories go too"
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(InvalidValueError, match=r"old.* cannot be written \("):
        write(tmp_path, {"another": "x", "old/file": "old is a file"})
    assert not (tmp_path / "another").exists()
    with pytest.raises(InvalidValueError, match="link cannot be written"):
        write(tmp_path, {"link": Link("another")})
    assert (tmp_path / "link").read_text() == "1", "a link that was there"


@pytest.mark.parametrize("at", ["mkdir", "replace", "symlink_to"])
def test_a_signal_at_any_moment_leaves_nothing(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come when something was done, and before the next line could note that."""
    (tmp_path / "old").write_text("before")
    own = getattr(Path, at)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, {"new/er/file": "1", "new/link": Link("er/file"), "old": "after"})
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "before"


def test_room_is_looked_for_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path, ["a/b", "c"])
    (tmp_path / "a").write_text("")
    with pytest.raises(InvalidValueError, match="a is no directory, and a/b must go there; move it away"):
        check_writable(tmp_path, ["a/b"])
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(InvalidValueError, match="cannot be written to, and c must go there"):
        check_writable(tmp_path, ["c"])


def test_places_of_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    check_places(ROOT, "mine", "Mine", writes=True)
    with pytest.raises(InvalidValueError, match="there are nodes called LTXVideo already|web/docs/LTXVideo"):
        check_places(ROOT, "mine", "LTXVideo", writes=False)
    with pytest.raises(InvalidValueError, match=r"example_workflows/wan21_tpu_basic\.json is there already"):
        check_places(ROOT, "wan21", "Mine", writes=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check_places(ROOT, "mine", "Mine", writes=False)
    with pytest.raises(InvalidValueError, match="cannot be written to"):
        check_places(ROOT, "mine", "Mine", writes=True)


@pytest.mark.parametrize("origin", [[], ["diffusers"], ["diffusers", None], "AutoencoderKL", [1, 2]])
def test_a_part_that_names_no_class(origin: object, tmp_path: Path) -> None:
    index = {"_class_name": "PixArtSigmaPipeline", "vae": origin, "other": []}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidValueError, match=r'says "vae": .*, expected a library and a class such as'):
        find_source(str(tmp_path))
