"""The preset "fast": what it stands for, what goes before it, and what a run does without, with the reason."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.config import FAST, AttentionConfig, FastSettings, GenerationSettings, Quantization, RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.wan.model import WAN21
from comfy_tpu.kernels.quantized import native_format
from comfy_tpu.pipeline import fast, running_model
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import small_flux
from tests.pipeline import small_pipeline
from tests.pipeline.test_reuse import PROMPT, TEN, with_curve

ROOT = Path(__file__).parents[2]
ON_A_CPU = "quantize (a CPU has no faster 8-bit products)"


def opened(directory: Path | None = None, mesh: str = "single", **chosen: Any) -> VideoPipeline:
    return VideoPipeline.open(directory or with_curve(), RuntimeConfig(mesh=mesh, **({"fast": FAST} | chosen)))


def lossy(settings: GenerationSettings) -> tuple[float, float]:
    return settings.reuse, settings.guidance_until


@pytest.fixture
def fp8_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that have 8-bit products, as far as the preset can see."""
    for module in (fast, running_model):
        monkeypatch.setattr(module, "native_format", lambda platform, chip: "fp8")


@pytest.mark.parametrize(("flow_shift", "forwards"), [(3.0, 43), (5.0, 43)], ids=["480P", "720P"])
def test_fifty_steps_of_wan_14b(flow_shift: float, forwards: int, tmp_path: Path) -> None:
    """On an H200 at 480P a forward takes 2.49 s, in fp8 2.15 s, and the text encoder and the VAE less than 2 s."""
    directory = Path(shutil.copytree(small_pipeline.directory(), tmp_path / "model"))
    path = directory / "transformer" / "config.json"
    facts = WAN21.card.reuse_curves["wan21-t2v-14b.json"]
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(facts)))
    pipeline = opened(directory)
    settings = pipeline.settings(num_inference_steps=50, flow_shift=flow_shift)
    assert pipeline.plan(settings).forwards == forwards
    every = dataclasses.replace(settings, reuse=0.0, guidance_until=1.0)
    assert pipeline.plan(every).forwards == 100
    assert (100 * 2.49 + 2) / (forwards * 2.15 + 2) > 2.6


def test_a_chosen_value_goes_before_the_preset() -> None:
    pipeline = opened()
    assert lossy(pipeline.settings()) == (FAST.reuse, FAST.guidance_until)
    assert lossy(pipeline.settings(reuse=0.0)) == (0.0, FAST.guidance_until)
    assert lossy(pipeline.settings(guidance_until=1.0, reuse=None)) == (FAST.reuse, 1.0)
    assert lossy(opened(fast=FastSettings(0.06, 0.9)).settings()) == (0.06, 0.9)
    assert lossy(opened(fast=None).settings()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("chosen", "quantize"),
    [({}, "fp8"), ({"quantize": "int8"}, "int8"), ({"quantize": "none"}, "none"), ({"fast": None}, "none")],
    ids=str,
)
@pytest.mark.usefixtures("fp8_devices")
def test_products_in_8_bits(chosen: dict[str, Any], quantize: str, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = opened(**chosen)
    assert pipeline.running.quantize == quantize
    assert pipeline.quantization == ("" if quantize == "none" else quantize)
    pipeline.settings()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("platform", "chip", "found"),
    [
        ("gpu", "h200", "fp8"),
        ("gpu", "h100", "fp8"),
        ("gpu", "nvidia a100-sxm4-80gb", "none"),
        ("tpu", "v7x", "fp8"),
        ("tpu", "v6e", "int8"),
        ("tpu", "v5p", "none"),
        ("cpu", "cpu", "none"),
    ],
)
def test_the_8_bit_format_of_a_chip(platform: Any, chip: str, found: Quantization) -> None:
    assert native_format(platform, chip) == found


@pytest.mark.parametrize(
    ("chosen", "implementation"),
    [
        ({}, "int8"),
        ({"attention": AttentionConfig(implementation="cudnn")}, "cudnn"),
        ({"quantize": "none"}, "auto"),
        ({"fast": None}, "auto"),
    ],
    ids=["preset", "chosen", "no 8 bits", "not fast"],
)
def test_attention_in_8_bits(chosen: dict[str, Any], implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_model, "has_int8_kernel", lambda platform, chip: True)
    pipeline = opened(**chosen)
    assert pipeline.running.attention.implementation == implementation
    assert ("int8 scores" in pipeline.quantization) == (implementation == "int8")


def test_attention_without_such_a_kernel() -> None:
    assert opened().running.attention.implementation == "auto"


def test_what_cannot_be_used_is_named_once_and_the_rest_is_used(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = opened()
    for _ in range(2):
        assert lossy(pipeline.settings()) == (FAST.reuse, FAST.guidance_until)
    assert [record.getMessage() for record in caplog.records] == [f"fast is used without {ON_A_CPU}"]


@pytest.mark.parametrize(
    ("mesh", "chosen", "used", "reason"),
    [
        ("single", {"guidance_scale": 1.0}, (0.12, 1.0), "guidance_scale=1 computes one branch anyway"),
        ("dp=2,tp=4", {}, (0.12, 1.0), "it saves no time on a mesh with dp=2, which divides two branches but not one"),
        ("dp=2,tp=4", {"num_videos": 2}, (0.12, FAST.guidance_until), None),
    ],
)
@pytest.mark.usefixtures("fp8_devices")
def test_guidance_that_saves_nothing(
    mesh: str,
    chosen: dict[str, Any],
    used: tuple[float, float],
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert lossy(opened(mesh=mesh).settings(**chosen)) == used
    assert caplog.messages == ([] if reason is None else [f"fast is used without guidance_until ({reason})"])


def test_a_model_without_guidance_and_without_a_curve(caplog: pytest.LogCaptureFixture) -> None:
    directory = small_flux.directory("dev")
    assert lossy(opened(directory).settings()) == (0.0, 1.0)
    (message,) = caplog.messages
    assert message.startswith(
        f"fast is used without reuse ({directory} has no reuse.json, which `comfy-tpu calibrate {directory}` makes); "
        "guidance_until (Flux.1 dev has no branch for a negative prompt); quantize ("
    )


@pytest.mark.thorough  # by default: the settings, above
def test_a_run_is_that_of_the_values_it_stands_for() -> None:
    chosen = TEN | {"num_inference_steps": 4}
    pipeline, plain = opened(), opened(fast=None)
    settings = pipeline.settings(**chosen)
    assert settings == plain.settings(**chosen, reuse=FAST.reuse, guidance_until=FAST.guidance_until)
    made = [each.denoise(each.encode(PROMPT, settings), settings) for each in (pipeline, plain)]
    assert torch.equal(*made)
    assert not torch.equal(made[1], plain.denoise(plain.encode(PROMPT, settings), plain.settings(**chosen)))


@pytest.mark.parametrize(
    "page",
    [
        *("README.md", "README.zh-CN.md", "docs/comfyui.md", "docs/comfyui.zh-CN.md", "locales/zh/nodeDefs.json"),
        *("web/docs/TPUOptions/en.md", "web/docs/TPUOptions/zh.md"),
    ],
)
def test_pages_name_the_values_of_the_preset(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").replace("`", "")
    names = ("--reuse", "--guidance-until") if page.startswith("README") else ("reuse", "guidance_until")
    values = zip(names, dataclasses.astuple(FAST), strict=True)
    assert all(f"{name} {value}" in text for name, value in values)


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [
        (FastSettings(reuse=2.0), "reuse=2.0 is not a number from 0 to 1"),
        (FastSettings(guidance_until=-1.0), "guidance_until=-1.0 is not a number from 0 to 1"),
    ],
)
def test_a_preset_of_bad_values_is_refused(preset: FastSettings, sentence: str) -> None:
    with pytest.raises(InvalidValueError, match=sentence):
        opened(fast=preset).settings()
