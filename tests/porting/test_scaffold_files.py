"""Where `port new` writes, and what it does not write."""

import dataclasses
import json
import os
import re
import types
from pathlib import Path
from typing import Any

import pytest

import comfy_tpu
from comfy_tpu.cli.main import main
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families import registry
from comfy_tpu.porting.scaffold import destination, pipelines, small_pipeline
from comfy_tpu.porting.scaffold.destination import Checkout, add_to_registry, check_name, find_checkout
from comfy_tpu.porting.scaffold.facts import SIZE_MIN, check_sizes
from comfy_tpu.porting.scaffold.files import check_writable, write
from comfy_tpu.porting.scaffold.pipelines import check_unclaimed, find_source, is_hub_id
from comfy_tpu.porting.scaffold.renderer import drop_unused_imports

ROOT = Path(__file__).parents[2]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["port", "new", *arguments, "--into", str(ROOT)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    {
        "no such class": (("mine", "--from", "NothingPipeline"), "--from NothingPipeline is no pipeline of diffusers"),
        "no pipeline": (("mine", "--from", "AutoencoderKL"), "--from AutoencoderKL is no pipeline of"),
        "neither": (("mine", "--from", "a/b"), "--from a/b is neither a model directory nor the name of a pipeline"),
        "supported": (("mine", "--from", "FluxPipeline"), "--from FluxPipeline is supported already, as Flux.1 dev"),
        "no transformer": (("mine", "--from", "StableDiffusionPipeline"), "has no transformer (it has vae, "),
        "another encoder": (
            ("mine", "--from", "SanaPipeline"),
            "the text_encoder of SanaPipeline is a Gemma2PreTrainedModel, for which there is no component",
        ),
        "another CLIP": (("mine", "--from", "StableDiffusion3Pipeline"), "is a CLIPTextModelWithProjection, for which"),
        "sizes": (("mine", "--from", "LattePipeline"), "no small LattePipeline could be made (TypeError: "),
        "an image": (
            ("mine", "--from", "CogVideoXImageToVideoPipeline"),
            "cannot be called without image, and `port new` knows only pipelines that make an image or a video from a "
            "prompt alone",
        ),
        "a control": (
            ("mine", "--from", "CogVideoXFunControlPipeline"),
            "has no attribute 'size'); it may want control_video, and `port new` knows only",
        ),
        "taken": (
            ("wan", "--from", "PixArtSigmaPipeline"),
            "NAME wan is taken by the family Wan (comfy_tpu.families.wan)",
        ),
        "no name": (("Pix-Art", "--from", "PixArtSigmaPipeline"), "NAME 'Pix-Art' is no name for a package"),
        "a keyword": (("class", "--from", "PixArtSigmaPipeline"), "NAME 'class' is no name for a package"),
        "a path": (("mine", "--from", "PixArtSigmaPipeline", "--model-id", "../.."), "--model-id ../.. is no id of"),
        "another family's model": (
            ("mine", "--from", "PixArtSigmaPipeline", "--model-id", "lightricks/LTX-video"),
            "--model-id lightricks/LTX-video belongs to comfy_tpu.families.ltx_video already",
        ),
        "two places": (
            ("mine", "--from", "PixArtSigmaPipeline", "--pack", "x"),
            "--pack x and a checkout are given; give --pack DIR or --into DIR, not both",
        ),
        "no id": (("mine", "--from", "PixArtSigmaPipeline", "--model-id", "x"), "--model-id x is no id of the hub"),
    }.values(),
)
def test_refusals_are_one_sentence(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    *_, sentence = refused(capsys, *arguments).splitlines()  # before it the libraries may have logged something
    assert sentence.startswith("comfy-tpu: ")
    assert said in sentence


def test_a_pipeline_that_its_small_parts_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any) -> None:
        raise ValueError("VACE layers [30] exceed the number of layers")

    monkeypatch.setattr(small_pipeline, "build_pipeline", build)
    source = find_source("WanVACEPipeline")
    with pytest.raises(
        UnsupportedError, match=r"no small WanVACEPipeline could be made \(ValueError: VACE .*; its sizes do not"
    ):
        small_pipeline.build_small_pipeline(source, {})


def test_a_directory_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["port", "new", "mine", "--from", "PixArtSigmaPipeline"]
    assert main([*command, "--into", str(tmp_path)]) == 1
    sentence = capsys.readouterr().err
    assert f"--into {tmp_path} is no checkout of comfy-tpu; give --pack DIR for a pack of its own, or git" in sentence
    assert find_checkout(str(ROOT)) == ROOT
    monkeypatch.setattr(comfy_tpu, "__file__", str(tmp_path / "site-packages/comfy_tpu/__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidValueError, match="no checkout is here, nor around this comfy-tpu; give --pack DIR"):
        find_checkout(None)


def test_a_pack_wants_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["port", "new", "mine", "--from", "PixArtSigmaPipeline", "--pack"]
    (tmp_path / "file").touch()
    assert main([*command, str(tmp_path)]) == 1
    assert f"--pack {tmp_path} is not empty, and nothing is overwritten" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "file")]) == 1
    assert f"--pack {tmp_path / 'file'} is no directory; give a new or an empty one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "a family": ("ltx_video", "name=ltx_video is taken by the family LTX-Video (comfy_tpu.families.ltx_video)"),
        "longest": ("a" * 40, None),
        "too long": ("a" * 300, "has 300 characters; use 40 at most"),
        "hidden": ("_a", "is no name for a package"),
    }.values(),
)
def test_names_that_cannot_be_used(name: str, said: str | None) -> None:
    if said is None:
        check_name(name)
        return
    with pytest.raises(InvalidValueError, match=re.escape(said)) as raised:
        check_name(name)
    assert raised.value.field == "name"


@pytest.mark.parametrize("name", ["shared", "card", "registry"])
def test_names_of_other_modules_are_taken(name: str) -> None:
    with pytest.raises(InvalidValueError, match=f"name={name} is taken: src/comfy_tpu/families/{name}.* exists"):
        Checkout(ROOT, name).check(writes=False)


def test_an_installed_family_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    (ltx,) = (card for card in registry.family_cards() if card.name == "ltx_video")
    (nodes,) = ltx.node_sets
    nodes = dataclasses.replace(nodes, key="PixArtSigma")
    installed = dataclasses.replace(ltx, package="comfy_tpu_mine", node_sets=(nodes,))
    for module in (destination, pipelines):
        monkeypatch.setattr(module, "family_cards", lambda: (installed,))
    with pytest.raises(
        InvalidValueError, match="name=mine is taken by the family LTX-Video .comfy_tpu_mine."
    ) as raised:
        check_name("mine")
    assert raised.value.field == "name"
    with pytest.raises(InvalidValueError, match="would make nodes called PixArtSigma, which comfy_tpu_mine has alr"):
        check_unclaimed(find_source("PixArtSigmaPipeline"), "a/b")


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
    """A widget's values are its smallest plus steps."""
    inputs = (ROOT / "src/comfy_tpu/comfy/inputs.py").read_text(encoding="utf-8")
    assert f"SIZE_MIN, FRAMES_MIN = {SIZE_MIN}, " in inputs
    for multiple in (8, 16, 32, 64):
        check_sizes(types.SimpleNamespace(size_multiple=multiple, title="Mine"))  # type: ignore[arg-type]
    odd: Any = types.SimpleNamespace(size_multiple=12, title="Mine")
    with pytest.raises(UnsupportedError, match="are multiples of 12, and the smallest of a node, 256, is none"):
        check_sizes(odd)


def test_one_line_of_the_registry() -> None:
    text = (ROOT / "src/comfy_tpu/families/registry.py").read_text(encoding="utf-8")
    after = add_to_registry(text, "comfy_tpu.families.mine").splitlines()
    added = after.index('    "comfy_tpu.families.mine",')
    assert after[:added] + after[added + 1 :] == text.splitlines()
    assert after[added + 1] == ")"
    with pytest.raises(UnsupportedError, match="has no list BUILT_IN to add a line to"):
        add_to_registry("BUILT_IN = []\n", "mine")


def test_imports_that_nothing_uses_are_left_out() -> None:
    text = "from __future__ import annotations\nimport re\nimport html\nfrom a import (\n    b,\n    c,\n)\n\nc(html)\n"
    assert drop_unused_imports(text) == (
        "from __future__ import annotations\nimport html\nfrom a import c\n\nc(html)\n"
    )


def test_all_files_or_none(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("before")
    write(tmp_path, {"old": "after", "new/file": "1"})
    assert ((tmp_path / "old").read_text(), (tmp_path / "new/file").read_text()) == ("after", "1")
    (tmp_path / "directory").mkdir()
    with pytest.raises(InvalidValueError, match=r"directory cannot be written \(.*\); everything is as it was$"):
        write(tmp_path, {"old": "again", "another": "x", "deep/er/file": "x", "directory": "cannot be a file"})
    assert (tmp_path / "old").read_text() == "after"
    assert not (tmp_path / "another").exists()
    assert not (tmp_path / "deep").exists(), "directories go too"
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(InvalidValueError, match=r"old.* cannot be written \("):
        write(tmp_path, {"another": "x", "old/file": "old is a file"})
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize("at", ["mkdir", "replace"])
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
        write(tmp_path, {"new/er/file": "1", "old": "after"})
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


def test_room_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    Checkout(ROOT, "mine").check(writes=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    Checkout(ROOT, "mine").check(writes=False)
    with pytest.raises(InvalidValueError, match="cannot be written to"):
        Checkout(ROOT, "mine").check(writes=True)


@pytest.mark.parametrize("origin", [[], ["diffusers"], ["diffusers", None], "AutoencoderKL", [1, 2]])
def test_a_part_that_names_no_class(origin: object, tmp_path: Path) -> None:
    index = {"_class_name": "PixArtSigmaPipeline", "vae": origin, "other": []}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidValueError, match=r'says "vae": .*, expected a library and a class such as'):
        find_source(str(tmp_path))
