"""Which flow shift a Wan directory is run with: its own files', a size's, or the one that is given."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.cli import options
from comfy_tpu.errors import CheckpointError
from comfy_tpu.families.settings import make_settings
from comfy_tpu.families.shared.schedulers import own_shift
from comfy_tpu.families.wan import model as wan_model
from comfy_tpu.families.wan.model import WAN21
from comfy_tpu.jobs.opening import choose_settings
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.families import wan_pipelines
from tests.families.wan_pipelines import KINDS
from tests.pipeline import small_pipeline

SCHEDULERS = {"flow_shift": "UniPCMultistepScheduler", "shift": "FlowMatchEulerDiscreteScheduler"}


def model(
    kind: str, at: Path, scheduler: dict[str, Any] | None, generation: dict[str, Any] | None = None
) -> ModelFiles:
    shutil.copytree(wan_pipelines.directory(kind), at)
    if scheduler is None:
        shutil.rmtree(at / "scheduler")
    else:
        described = {"_class_name": SCHEDULERS[next(iter(scheduler))], **scheduler} if scheduler else {}
        (at / "scheduler" / "scheduler_config.json").write_text(json.dumps(described))
    if generation is not None:
        (at / "generation.json").write_text(json.dumps(generation))
    return ModelFiles.open(at)


def shift(files: ModelFiles, *arguments: str) -> float:
    """That of `comfy-tpu generate` with these arguments."""
    parser = argparse.ArgumentParser()
    options.add_settings(parser)
    chosen = choose_settings(vars(parser.parse_args(arguments)), files.family.card.sizes)
    return make_settings(files.defaults, chosen, files.family.card.limits).flow_shift


PAIRS = ("2.2", "2.2 image")
OTHERS = [kind for kind in KINDS if kind not in PAIRS]


@pytest.mark.parametrize("kind", OTHERS)
def test_the_scheduler_folder_says_the_shift(kind: str) -> None:
    found = ModelFiles.open(wan_pipelines.directory(kind)).defaults
    assert found.flow_shift == wan_pipelines.reference(kind).scheduler.config.flow_shift


@pytest.mark.parametrize("name", ["flow_shift", "shift"])
@pytest.mark.parametrize("kind", OTHERS)
def test_by_either_name(kind: str, name: str, tmp_path: Path) -> None:
    assert model(kind, tmp_path / "m", {name: 7}).defaults.flow_shift == 7.0


@pytest.mark.parametrize("scheduler", [None, {}])
def test_without_one_it_is_the_family_s(scheduler: dict[str, Any] | None, tmp_path: Path) -> None:
    assert model("5B", tmp_path / "m", scheduler).defaults.flow_shift == wan_model.WAN22_5B.card.defaults.flow_shift


@pytest.mark.parametrize(("kind", "expected"), [("2.2", 12.0), ("2.2 image", 5.0)])
def test_a_pair_has_its_authors_shift_whatever_the_conversion_wrote(kind: str, expected: float, tmp_path: Path) -> None:
    assert model(kind, tmp_path / "m", {"flow_shift": 3.0}).defaults.flow_shift == expected


def test_generation_json_has_the_last_word(tmp_path: Path) -> None:
    assert model("5B", tmp_path / "m", {"flow_shift": 7.0}, {"flow_shift": 4.0}).defaults.flow_shift == 4.0


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [("2.2", "720P", 12.0), ("2.2", "480P", 12.0), ("2.2 image", "720P", 5.0), ("2.2 image", "480P", 3.0)],
)
def test_a_size_that_is_chosen_brings_its_own_and_a_given_one_goes_before_all(
    kind: str, size: str, expected: float, tmp_path: Path
) -> None:
    files = model(kind, tmp_path / "m", {"flow_shift": 7.0}, {"flow_shift": 4.0})
    assert shift(files, "--size", size) == expected
    assert shift(files, "--size", size, "--flow-shift", "2") == 2.0
    assert shift(files, "--width", "640") == 4.0


def test_that_of_wan21_goes_with_the_size() -> None:
    files = ModelFiles.open(small_pipeline.directory())
    assert small_pipeline.reference().scheduler.config.flow_shift == 3.0
    assert shift(files) == shift(files, "--size", "720P") == WAN21.card.defaults.flow_shift == 5.0
    assert shift(files, "--size", "480P") == 3.0


@pytest.mark.parametrize("value", ["3.0", None, True])
def test_a_shift_that_is_no_number(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"flow_shift={value!r}, expected a number; download the model again"):
        own_shift(lambda name: {"flow_shift": value})
    with pytest.raises(CheckpointError, match=f"flow_shift={value!r}, expected a value such as 1.0; download"):
        model("5B", tmp_path / "m", {"flow_shift": value})
