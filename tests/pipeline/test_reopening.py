"""A model that is opened again and again in one process, as a server does, leaves nothing behind."""

import gc

import pytest

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.pipeline.video import VideoPipeline
from tests.pipeline import small_pipeline


def make_video() -> None:
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))
    settings = pipeline.settings(height=32, width=32, num_frames=5, num_inference_steps=1, max_sequence_length=16)
    list(pipeline.generate("a red circle", settings))


def count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
def test_no_objects_are_left_behind() -> None:
    for _ in range(2):  # what is imported, traced and kept once
        make_video()
    before = count_objects()
    make_video()
    # Over 900 a time were, of jit functions that jnp.einsum makes anew at every call.
    assert count_objects() - before < 30
