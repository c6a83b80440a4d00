"""Iterators that are left half read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.pipeline import generators
from comfy_tpu.pipeline.video import VideoPipeline
from tests.pipeline import small_pipeline

ROOT = Path(__file__).parents[2]

# Names of the module that holds them are gone when Python closes what is left, unless it was closed before.
HALF_READ = """
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import ResidencyConfig, RuntimeConfig
from comfy_tpu.pipeline.generators import close_at_exit

@close_at_exit
def frames():
    with Residency(ResidencyConfig(budget_bytes=10)).use("x", label="x", nbytes_per_device=1, load=dict):
        try:
            yield 1
        finally:
            print("released", flush=True)

left = frames()
next(left)
"""


@pytest.mark.thorough  # by default: what is closed in a process that goes on
def test_what_is_half_read_is_closed_before_python_ends() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", HALF_READ], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "released\n", "")


def test_frames_and_steps_are_closed_at_the_end() -> None:
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))
    settings = pipeline.settings(height=16, width=16, num_frames=5)
    frames = pipeline.decode(torch.zeros(pipeline.latent_shape(settings)), settings)
    assert frames in generators._unfinished
    generators._close_unfinished()
    assert list(frames) == []
    assert pipeline._steps.__wrapped__ is not None


def test_one_that_runs_in_another_thread_is_left_alone() -> None:
    @generators.close_at_exit
    def itself():
        generators._close_unfinished()  # as from another thread while this one is inside
        yield 1

    assert list(itself()) == [1]
