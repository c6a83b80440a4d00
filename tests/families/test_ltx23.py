"""LTX-2.3 against diffusers' own pipelines: what it changed of LTX-2, in every part of the model."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME
from tests.families import small_ltx2
from tests.families.meshes import AUTO, MESHES, SINGLE
from tests.families.test_ltx2 import Made, by_diffusers, closeness, made, picture

SMALL = "64x64x9"


@functools.cache
def opened(mesh: str) -> VideoPipeline:
    return VideoPipeline.open(small_ltx2.directory(later=True), RuntimeConfig(mesh=mesh))


@functools.cache
def expected(size: str) -> Made:
    return by_diffusers(size, small_ltx2.reference(later=True), stg_scale=1.0)


def test_it_is_told_from_ltx2() -> None:
    names = {later: ModelFiles.open(small_ltx2.directory(later=later)).family.name for later in (False, True)}
    assert names == {False: "LTX-2", True: "LTX-2.3"}


DEFAULT, *OTHER = AUTO["LTX-2.3"]
"""What `auto` takes: the first by default, because all of the model's parts are in one comparison."""


@pytest.mark.thorough  # by default: those of LTX-2, test_ltx2.py
@pytest.mark.parametrize(
    ("mesh", "size"),
    [
        (DEFAULT, SMALL),
        *(pytest.param(mesh, SMALL, marks=pytest.mark.slow) for mesh in (*MESHES, *OTHER)),
        *(pytest.param(mesh, "96x64x17", marks=pytest.mark.slow) for mesh in (SINGLE, DEFAULT)),
    ],
)
def test_video_and_sound_are_those_of_diffusers(mesh: str, size: str) -> None:
    assert min(part.std() for part in expected(size)) > 0.05, "the reference shows and plays something"
    assert min(closeness(made(opened(mesh), size), expected(size))) >= SAME


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [SINGLE, DEFAULT])
def test_a_video_from_a_first_frame_is_that_of_diffusers(mesh: str) -> None:
    wanted = by_diffusers(SMALL, small_ltx2.image_reference(later=True), image=picture(), stg_scale=1.0)
    assert min(closeness(made(opened(mesh), SMALL, [picture()]), wanted)) >= SAME
    assert max(closeness(wanted, expected(SMALL))) < 60, "the image has an effect, also on the sound"


@pytest.mark.slow  # by default, that of LTX-2
def test_one_compilation_for_every_prompt() -> None:
    pipeline = opened(DEFAULT)
    made(pipeline, SMALL)
    with count_compilations() as count:
        other = made(pipeline, SMALL, seed=8, negative_prompt="", stg_block=2, audio_guidance_scale=4.0)
    assert count.requested == 0
    assert max(closeness(other, expected(SMALL))) < 60


@pytest.mark.parametrize(
    "changed", [{"ff_bias": False}, {"use_keyframes_abs_pos_embedding": True}, {"use_prompt_adaln_single": False}]
)
def test_ltx25_is_refused_before_anything_is_loaded(changed: dict[str, bool], tmp_path: Path) -> None:
    """By its transformer's configuration, whatever its other parts are: that of the text encoder is Gemma 4's."""
    source = small_ltx2.directory(later=True)
    shutil.copytree(source, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "model" / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(
        UnsupportedError, match=r"model=.*: the transformer is that of LTX-2\.5 .*; use LTX-2\.3 \(diffusers/"
    ):
        VideoPipeline.open(tmp_path / "model", RuntimeConfig(mesh=SINGLE))
