"""Prompts that hold for a part of the steps: other inputs of the same programs."""

from __future__ import annotations

import dataclasses
import functools

import torch

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.config import GenerationSettings, RuntimeConfig
from comfy_tpu.pipeline.embeddings import PromptEmbeddings, TimedEmbeddings
from comfy_tpu.pipeline.second_pass import start_from
from comfy_tpu.pipeline.video import VideoPipeline
from tests.pipeline import small_pipeline


@functools.cache
def pipeline() -> VideoPipeline:
    return VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))


def settings() -> GenerationSettings:
    return pipeline().settings(
        height=48, width=80, num_frames=9, num_inference_steps=4, guidance_scale=4.0, max_sequence_length=16
    )


def velocities(embeddings: PromptEmbeddings) -> list[torch.Tensor]:
    return [velocity.clone() for velocity in pipeline().velocities(embeddings, settings())]


def test_each_step_reads_the_prompt_of_its_time_and_nothing_is_compiled_for_it() -> None:
    first, second = (pipeline().encode_text(prompt, settings()) for prompt in ("a red circle", "blue on black"))
    before = velocities(first)
    timed = dataclasses.replace(
        first,
        timed_positive=(
            TimedEmbeddings(0.0, 0.5, first.positive),
            TimedEmbeddings(0.5, 1.0, second.positive),
        ),
    )
    with count_compilations() as count:
        made = velocities(timed)
    assert count.requested == 0
    assert [torch.equal(*pair) for pair in zip(before, made, strict=True)] == [True, True, False, False]
    assert not torch.equal(made[2], velocities(second)[2]), "it goes on from what the first prompt began"


def test_steps_that_are_left_out_count() -> None:
    """As in ComfyUI, whose shares are those of all steps."""
    first, second = (pipeline().encode_text(prompt, settings()) for prompt in ("a red circle", "blue on black"))
    halves = (TimedEmbeddings(0.0, 0.5, first.positive), TimedEmbeddings(0.5, 1.0, second.positive))
    begun = torch.randn(pipeline().latent_shape(settings()), generator=torch.Generator().manual_seed(1))
    timed = velocities(start_from(dataclasses.replace(first, timed_positive=halves), begun, 0.5))
    assert len(timed) == 2
    assert all(torch.equal(*pair) for pair in zip(timed, velocities(start_from(second, begun, 0.5)), strict=True))


def test_the_same_prompt_in_two_ranges_is_that_prompt() -> None:
    given = pipeline().encode_text("a red circle", settings())
    copied = {name: tensor.clone() for name, tensor in given.positive.items()}
    halves = (TimedEmbeddings(0.0, 0.3, given.positive), TimedEmbeddings(0.3, 1.0, copied))
    made = velocities(dataclasses.replace(given, timed_positive=halves))
    assert all(torch.equal(*pair) for pair in zip(velocities(given), made, strict=True))
