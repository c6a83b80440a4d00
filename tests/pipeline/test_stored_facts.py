"""Facts that are kept for later processes: schedules, and what a step costs."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from comfy_tpu.compiler.stored import ProgramStore
from comfy_tpu.config import CacheConfig, RuntimeConfig
from comfy_tpu.pipeline import step_work
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VideoPipeline:
    monkeypatch.setenv("COMFY_TPU_PROGRAM_STORE", "1")
    return VideoPipeline.open("demo", RuntimeConfig(mesh="single", cache=CacheConfig(directory=tmp_path)))


@pytest.mark.parametrize("scheduler", ["unipc", "euler", "dpm++"])
def test_a_stored_schedule_is_the_same_bit_for_bit(
    pipeline: VideoPipeline, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = pipeline.settings(scheduler=scheduler, num_inference_steps=7)
    first = pipeline.plan(settings)
    monkeypatch.setattr(ModelFiles, "scheduler", lambda *_: pytest.fail("made again"))
    again = pipeline.plan(dataclasses.replace(settings, seed=5, negative_prompt="blur"))
    for one, other in zip(first, again, strict=True):
        assert (one.timestep, one.sigma) == (other.timestep, other.sigma)
        assert np.array_equal(one.coefficients, other.coefficients)


@pytest.mark.parametrize(
    "change", [{"num_inference_steps": 8}, {"flow_shift": 2.0}, {"scheduler": "euler"}, {"height": 128}]
)
def test_other_settings_are_another_schedule(
    pipeline: VideoPipeline, change: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = pipeline.settings(num_inference_steps=7)
    pipeline.plan(settings)
    made = []
    own = ModelFiles.scheduler
    monkeypatch.setattr(ModelFiles, "scheduler", lambda *given: made.append(1) or own(*given))
    pipeline.plan(dataclasses.replace(settings, **change))
    assert made == [1]


def test_a_stored_workload_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, store = ModelFiles.open("demo"), ProgramStore(tmp_path, 10**9)
    expected = files.workload(files.defaults)
    assert files.workload(files.defaults, store) == expected
    step_work._find_structure.cache_clear()
    monkeypatch.setattr(step_work, "_structure", lambda model: pytest.fail("traced again"))
    assert files.workload(files.defaults, store) == expected


def test_workloads_of_other_models_are_others(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path, 10**9)
    demo = ModelFiles.open("demo")
    image = ModelFiles.open("demo-image")
    assert demo.workload(demo.defaults, store) != image.workload(image.defaults, store)
    assert len(list(tmp_path.rglob("workload-*"))) == 2
