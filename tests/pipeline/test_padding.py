"""Text padding that is left out on one CPU device gives what the padding itself gives."""

import functools
from typing import Any

import pytest
import torch

from comfy_tpu.config import RuntimeConfig
from comfy_tpu.pipeline import denoise
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.padding import merge_padding, restore_padding, trim_tokens
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import wan_pipelines
from tests.pipeline import small_pipeline
from tests.tracing import relative_error

PROMPT = "a red circle moving left"
SETTINGS: dict[str, Any] = {
    "height": 64,
    "width": 96,
    "num_frames": 9,
    "num_inference_steps": 1,
    "guidance_scale": 4.0,
    "max_sequence_length": 192,
}
SAME = 1e-5
"""The relative error of latents: 4e-6 was found over 20 steps of the demo model."""


@functools.cache
def opened(kind: str, mesh: str = "single", dtype: str = "auto") -> VideoPipeline:
    directory = small_pipeline.directory() if kind == "2.1" else wan_pipelines.directory(kind)
    return VideoPipeline.open(directory, RuntimeConfig(mesh=mesh, dtype=dtype))


def encode(kind: str, prompt: str = PROMPT) -> PromptEmbeddings:
    pipeline = opened(kind)
    images = [wan_pipelines.picture(1)] if "image" in kind else []
    return pipeline.encode(prompt, pipeline.settings(**SETTINGS), images)


def latents(kind: str, embeddings: PromptEmbeddings) -> torch.Tensor:
    return opened(kind).denoise(embeddings, opened(kind).settings(**SETTINGS))


@pytest.mark.parametrize(
    ("used", "length", "count"), [(0, 64, 449), (1, 64, 449), (63, 64, 449), (64, 128, 385), (447, 448, 65)]
)
def test_lengths(used: int, length: int, count: int) -> None:
    text = torch.zeros(2, 512, 4)
    text[1, :used] = 1
    merged = merge_padding(text)
    assert merged["text"].shape == (2, length, 4)
    assert merged["padding_count"].tolist() == [count] * 2
    assert count + length - 1 == 512
    assert not merged["text"][:, -1].any(), "the last one is padding"


@pytest.mark.parametrize("used", [448, 511, 512])
def test_where_there_is_too_little_padding_nothing_changes(used: int) -> None:
    text = torch.zeros(2, 512, 4)
    text[0, :used] = 1
    assert list(merge_padding(text)) == ["text"]
    assert merge_padding(text)["text"] is text


def test_tokens_are_trimmed_and_their_embeddings_padded() -> None:
    mask = torch.zeros(2, 512, dtype=torch.int32)
    mask[0, :70], mask[1, :3] = 1, 1
    assert {name: rows.shape for name, rows in trim_tokens({"input_ids": mask, "attention_mask": mask}).items()} == {
        "input_ids": (2, 128),
        "attention_mask": (2, 128),
    }
    restored = restore_padding(torch.ones(2, 128, 4), 512)
    assert restored.shape == (2, 512, 4)
    assert restored.sum() == 2 * 128 * 4


@pytest.mark.default_cases("2.1")
@pytest.mark.parametrize("kind", ["2.1", pytest.param("2.1 image", marks=pytest.mark.slow), "5B"])
def test_latents_are_those_of_all_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = encode(kind)
    merged = latents(kind, embeddings)
    with monkeypatch.context() as patch:  # one token in the place of 129
        patch.setattr(denoise, "merge_padding", lambda text: merge_padding(text) | {"padding_count": torch.ones(2)})
        wrong = latents(kind, embeddings)
    monkeypatch.setattr(RunningModel, "skips_padding", False)
    every = latents(kind, embeddings)
    assert relative_error(merged, every) < SAME
    assert relative_error(wrong, every) > 3 * SAME


@pytest.mark.parametrize("prompt", [PROMPT, " ".join(["a red circle"] * 30)], ids=["short", "long"])
def test_embeddings_are_those_of_all_tokens(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = encode("2.1", prompt)
    monkeypatch.setattr(RunningModel, "skips_padding", False)
    every = encode("2.1", prompt)
    for branch, expected in ((trimmed.positive, every.positive), (trimmed.negative, every.negative)):
        assert branch is not None
        assert expected is not None
        torch.testing.assert_close(branch["text"], expected["text"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "dtype", "skips"), [("single", "auto", True), ("single", "bfloat16", False), ("dp=2,tp=4", "auto", False)]
)
def test_where_padding_is_left_out(mesh: str, dtype: str, skips: bool) -> None:
    assert opened("2.1", mesh, dtype).running.skips_padding == skips
