"""Wan 2.2's pair where only one of the two has room: what the registry does, and that nobody sees it in the video."""

import functools

import pytest
import torch

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.residency import Residency, ResidencyEvent
from comfy_tpu.config import GenerationSettings, ResidencyConfig, RuntimeConfig
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import wan_pipelines
from tests.families.test_wan import chosen
from tests.pipeline.test_video import PROMPT

FIRST, SECOND = "transformer", "transformer_2"


def opened(budget: int | None, mesh: str = "single") -> tuple[VideoPipeline, Residency, list[tuple[str, str]]]:
    """With a registry of its own, and what happens in it: ("loaded", "transformer") and so on."""
    residency = Residency(ResidencyConfig(budget_bytes=budget))
    events: list[tuple[str, str]] = []

    def hear(event: ResidencyEvent) -> None:
        events.append((event.kind, event.entry.label.split()[-1]))

    residency.add_callback(hear)
    return (
        VideoPipeline.open(wan_pipelines.directory("2.2"), RuntimeConfig(mesh=mesh), name="m", residency=residency),
        residency,
        events,
    )


@functools.cache
def resident(mesh: str) -> tuple[PromptEmbeddings, GenerationSettings, torch.Tensor, int]:
    """The prompt, the settings, the latents of a run with room for both, and the bytes of one on a device."""
    pipeline, residency, events = opened(None, mesh)
    settings = pipeline.settings(**chosen("2.2"))
    embeddings = pipeline.encode(PROMPT, settings)
    latents = pipeline.denoise(embeddings, settings)
    assert [event for event in events if event[1] in (FIRST, SECOND)] == [("loaded", FIRST), ("loaded", SECOND)]
    sizes = {entry.bytes_per_device for entry in residency.entries() if "transformer" in entry.label}
    assert len(sizes) == 1, "they are of one make"
    return embeddings, settings, latents, sizes.pop()


def check_turns(mesh: str) -> None:
    embeddings, settings, expected, nbytes = resident(mesh)
    pipeline, residency, events = opened(nbytes, mesh)
    assert [step.transformer for step in pipeline.plan(settings)] == [0, 0, 1, 1]
    assert torch.equal(pipeline.denoise(embeddings, settings), expected)
    assert events == [("loaded", FIRST), ("evicted", FIRST), ("loaded", SECOND)]
    events.clear()
    with count_compilations() as count:
        assert torch.equal(pipeline.denoise(embeddings, settings), expected)
    assert count.requested == 0, "weights that come back are inputs of the programs that are there"
    assert events == [("evicted", SECOND), ("loaded", FIRST), ("evicted", FIRST), ("loaded", SECOND)]
    (left,) = residency.entries()
    assert left.label == f"m {SECOND}"
    assert not left.in_use


def test_the_second_takes_the_place_of_the_first_once_and_the_video_is_the_same() -> None:
    check_turns("single")


@pytest.mark.slow
def test_over_a_mesh_too() -> None:
    check_turns("dp=2,sp=4")


def test_the_switch_itself_compiles_nothing() -> None:
    """In the very first run: what is compiled for the first transformer is all that the second one needs."""
    embeddings, settings, _, nbytes = resident("single")
    pipeline, _, events = opened(nbytes)
    heard: list[str] = []
    pipeline.on_progress = lambda progress: heard.append(f"{progress.stage} {progress.done}")
    pipeline.denoise(embeddings, settings)
    assert events[-1] == ("loaded", SECOND)
    before = heard.index("denoising 2")
    assert any(said.startswith("compiling") for said in heard[:before])
    assert not any(said.startswith("compiling") for said in heard[before:])
    assert any(said.startswith("loading") for said in heard[before:])
