"""Presets of a model directory, LoRAs that bring or ask for one, pairs of LoRAs, and the report before a load."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file

from comfy_tpu.config import Lora, MeshSizes, RuntimeConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.settings import merge_choices
from comfy_tpu.pipeline.lora import noise_of_name, open_loras
from comfy_tpu.pipeline.lora_report import LoraTargets, report_lora, summarize
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import psnr
from tests.families import wan_pipelines
from tests.pipeline import small_loras, small_pipeline
from tests.pipeline.small_loras import Tensors, random

SMALL: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 9, "max_sequence_length": 16, "seed": 3}
FOUR = {"num_inference_steps": 4, "guidance_scale": 1.0, "scheduler": "euler-trailing", "flow_shift": 3.0}
Q = "diffusion_model.blocks.0.self_attn.q"


def write(path: Path, tensors: Tensors, **metadata: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata or None)
    return path


def lightning(alpha: int = 8, rank: int = 64) -> Tensors:
    """As the files of Wan2.2-Lightning: rank 64 with an alpha of 8 in int64."""
    return {
        f"{Q}.lora_down.weight": random(rank, 96, seed=1),
        f"{Q}.lora_up.weight": random(96, rank, seed=2),
        f"{Q}.alpha": torch.tensor(alpha),
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The small model, with a preset that brings its LoRA."""
    path = tmp_path / "model"
    shutil.copytree(small_pipeline.directory(), path)
    write(path / "lora" / "few.safetensors", small_loras.original_style(), **{"comfy_tpu.preset": "4step"})
    put(path, {"4step": {"settings": FOUR, "lora": "lora/few.safetensors"}})
    return path


def put(directory: Path, presets: object) -> None:
    (directory / "presets.json").write_text(json.dumps(presets))


def latents(pipeline: VideoPipeline, **chosen: Any) -> torch.Tensor:
    settings = pipeline.settings(**SMALL, **merge_choices(pipeline.preset.settings, chosen))
    return pipeline.denoise(pipeline.encode("a red circle", settings), settings)


def test_a_preset_of_the_directory_brings_its_lora_and_settings(directory: Path) -> None:
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"), preset="4step")
    assert pipeline.preset.settings == FOUR
    assert [lora.file.path.name for lora in pipeline.loras.opened] == ["few.safetensors"]
    with_preset = latents(pipeline)
    pipeline.use_loras([])
    assert pipeline.preset.name is None
    assert not pipeline.loras.opened
    settings = {name: value for name, value in FOUR.items() if name != "flow_shift"}
    pipeline.use_loras([Lora(directory / "lora" / "few.safetensors")])
    assert torch.equal(latents(pipeline, **settings, flow_shift=3.0), with_preset), "the same by hand"
    pipeline.use_loras([Lora(directory / "lora" / "few.safetensors")], "4step")
    assert len(pipeline.loras.opened) == 1, "given by hand as well, it counts once"


@pytest.mark.thorough  # by default: LoRA files, test_lora.py
def test_the_video_is_that_of_diffusers_with_the_lora_and_the_same_noise_levels(directory: Path) -> None:
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single", dtype="float32"), preset="4step")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    reference = small_loras.pipeline((directory / "lora" / "few.safetensors", 1.0), scheduler=scheduler)
    own = scheduler.set_timesteps
    reference.scheduler.set_timesteps = lambda steps, device=None: own(
        sigmas=[1 - each / steps for each in range(steps)]
    )
    frames = reference(
        "a red circle",
        **{name: SMALL[name] for name in ("height", "width", "num_frames", "max_sequence_length")},
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(SMALL["seed"]),
        output_type="pt",
    ).frames.permute(0, 1, 3, 4, 2)
    settings = pipeline.settings(**SMALL, **pipeline.preset.settings)
    made = torch.cat(list(pipeline.generate("a red circle", settings)), dim=1)
    assert psnr(made, frames) >= 100


def test_auto_is_what_the_lora_says_of_itself(directory: Path, tmp_path: Path) -> None:
    said = write(tmp_path / "x.safetensors", small_loras.original_style(), **{"comfy_tpu.preset": "4step"})
    silent = write(tmp_path / "y.safetensors", small_loras.original_style())
    files = ModelFiles.open(directory)
    for path, name in ((said, "4step"), (silent, None)):
        pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"), loras=[Lora(path)], preset="auto")
        assert pipeline.preset.name == name
        assert [lora.file.path for lora in pipeline.loras.opened] == [path], "auto brings none along"
    assert files.presets["4step"].lora


def test_a_model_says_it_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "Wan2.1-T2V-14B-StepDistill-CfgDistill"
    shutil.copytree(small_pipeline.directory(), path)
    pipeline = VideoPipeline.open(path, RuntimeConfig(mesh="single"), preset="auto")
    assert pipeline.preset.name == "4step"


def test_a_mismatch_is_warned_of_once(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "lightx2v_4step.safetensors", small_loras.original_style())
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"), loras=[Lora(path)])
    for _ in range(2):
        pipeline.warn_of_preset(pipeline.settings(num_inference_steps=50, guidance_scale=5.0))
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage().startswith(
        f"lora={path} was distilled for 4 steps at guidance_scale 1, and this run has"
    )
    caplog.clear()
    pipeline.use_loras([Lora(path, 0.0)])
    pipeline.warn_of_preset(pipeline.settings())
    assert not caplog.records, "with no strength it is not in the model"


BAD_FILES = {
    "a list": ([], "holds a list, expected an object"),
    "no settings": ({"x": {}}, r"the preset x cannot be used \('settings'\)"),
    "another key": ({"x": {"settings": {}, "loras": []}}, "it has other keys than settings and lora"),
    "an unknown setting": ({"x": {"settings": {"heigth": 1}}}, "heigth is not a setting"),
    "a bad value": ({"x": {"settings": {"num_inference_steps": 0}}}, "num_inference_steps=0 is not allowed"),
    "a path outside": ({"x": {"settings": {}, "lora": "../a.safetensors"}}, "is not a path inside the model directory"),
    "an absolute path": ({"x": {"settings": {}, "lora": "/a.safetensors"}}, "is not a path inside the model directory"),
}


@pytest.mark.parametrize(("content", "sentence"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_damaged_presets_file_is_a_sentence(directory: Path, content: object, sentence: str) -> None:
    put(directory, content)
    with pytest.raises(CheckpointError, match=sentence):
        _ = ModelFiles.open(directory).presets


def test_unknown_and_missing_presets_are_refused_before_devices_start(directory: Path) -> None:
    with pytest.raises(InvalidValueError, match="preset=8step is unknown for model .*; choose from 4step, or auto"):
        VideoPipeline.open(directory, preset="8step")
    put(directory, {})
    with pytest.raises(InvalidValueError, match="preset=4step is given, but model .* has no presets; leave it out"):
        VideoPipeline.open(directory, preset="4step")
    put(directory, {"4step": {"settings": FOUR, "lora": "lora/gone.safetensors"}})
    with pytest.raises(InvalidValueError, match="gone.safetensors is not a file"):
        VideoPipeline.open(directory, preset="4step")


def test_without_guidance_all_devices_work_on_one_branch() -> None:
    pipeline = VideoPipeline.open("demo", RuntimeConfig(platform="cpu"))
    few = pipeline.choose_placement(pipeline.settings(**pipeline.preset.presets["4step"].settings))
    assert (pipeline.placement.sizes, few.sizes) == (MeshSizes(dp=2, sp=4), MeshSizes(sp=8))


NOISES = {
    "high_noise_model": "high",
    "low_noise_model": "low",
    "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise": "low",
    "Wan2.2-Lightning_T2V-A14B-4steps-lora_HIGH_fp16": "high",
    "Wan_2_2_I2V_A14B_LOW_lightx2v_4step_lora_260412_rank_64_fp16": "low",
    "2.2-Lightning-T2V-0928-L": "low",
    "low_poly_style": None,
    "high-contrast": None,
    "wan2.2_highway_cars": None,
}


@pytest.mark.parametrize(("name", "noise"), NOISES.items())
def test_half_of_a_pair_is_recognised_by_its_name(name: str, noise: str | None) -> None:
    assert noise_of_name(Path(f"/loras/{name}.safetensors")) == noise


def test_each_of_a_pair_goes_to_its_transformer_with_its_strength(tmp_path: Path) -> None:
    files = ModelFiles.open(wan_pipelines.directory("2.2"))
    pair = [write(tmp_path / f"{noise}_noise_model.safetensors", lightning()) for noise in ("high", "low")]
    loras = open_loras([Lora(pair[0], 0.9), Lora(pair[1], 0.8)], files)
    strengths = [[lora.strength for lora in loras.for_transformer(number).opened] for number in (0, 1)]
    assert strengths == [[0.9], [0.8]]
    both = open_loras([Lora(pair[0], noise="all"), Lora(pair[1], noise="high")], files)
    assert [len(both.for_transformer(number).opened) for number in (0, 1)] == [2, 1], "what is said goes before names"


def test_half_a_pair_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = ModelFiles.open(wan_pipelines.directory("2.2"))
    high = write(tmp_path / "high_noise_model.safetensors", lightning())
    open_loras([Lora(high)], files)
    assert "is for high noise, and nothing is given for low noise; give the other file of the pair" in caplog.text
    caplog.clear()
    open_loras([Lora(write(tmp_path / "style.safetensors", lightning()), noise="high")], files)
    assert not caplog.records, "a file of its own for one of them is nobody's half"


def test_a_pair_for_one_transformer_is_refused(tmp_path: Path) -> None:
    pair = [write(tmp_path / f"{noise}_noise_model.safetensors", lightning()) for noise in ("high", "low")]
    with pytest.raises(
        InvalidValueError, match="are a pair for two transformers, of high and low noise, and model .* has"
    ):
        open_loras([Lora(path) for path in pair], ModelFiles.open(small_pipeline.directory()))


def test_an_alpha_of_whole_numbers_scales_as_any_other(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", lightning(alpha=8, rank=64))
    (lora,) = open_loras([Lora(path)], ModelFiles.open(small_pipeline.directory())).opened
    assert lora.factors["blocks.0.attn1.to_q.weight"].scale == 8 / 64


def test_a_report_says_what_fits_and_what_it_is_for(tmp_path: Path) -> None:
    tensors = {
        **lightning(),
        "diffusion_model.blocks.0.norm3.diff": random(96, seed=3),
        "diffusion_model.blocks.1.self_attn.k.diff_b": random(96, seed=4),
        "diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight": random(4, 96, seed=5),
        "diffusion_model.blocks.0.cross_attn.k_img.lora_up.weight": random(96, 4, seed=6),
        "text_encoders.a.lora_down.weight": random(4, 96, seed=7),
    }
    path = write(tmp_path / "Wan2.2-Lightning-4steps_high_noise.safetensors", tensors, note="x")
    report = report_lora(path, LoraTargets.find(str(wan_pipelines.directory("2.2"))))
    assert (report.style, report.ranks, report.scales) == ("ComfyUI", (4, 64), (0.125,))
    assert (report.low_rank, report.differences, report.biases) == (3, 1, 1)
    assert (report.matched_modules, report.modules, report.text_keys) == (3, 4, 1)
    assert report.unmatched_keys == (
        "diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight",
        "diffusion_model.blocks.0.cross_attn.k_img.lora_up.weight",
    )
    assert (report.noise, report.preset, report.problem) == ("high", "4step", None)
    assert report.metadata == {"note": "x"}
    json.dumps(report.as_document())


def test_a_report_of_a_published_model_needs_no_download(tmp_path: Path) -> None:
    wide = {
        f"{Q}.lora_down.weight": torch.zeros(4, 5120),
        f"{Q}.lora_up.weight": torch.zeros(5120, 4),
    }
    place = LoraTargets.find("Wan2.1-T2V-14B-Diffusers")
    assert place.model == "Wan-AI/Wan2.1-T2V-14B-Diffusers"
    assert report_lora(write(tmp_path / "a.safetensors", wide), place).problem is None
    narrow = report_lora(write(tmp_path / "b.safetensors", lightning()), place)
    assert narrow.problem is not None
    assert "use a LoRA made for this size of Wan 2.1" in narrow.problem


def test_a_lora_of_another_model_is_refused_before_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfy_tpu.pipeline.model_files._find_download", lambda model: None)
    monkeypatch.setattr("comfy_tpu.pipeline.model_files._download", lambda *_: pytest.fail("a download begins"))
    path = write(tmp_path / "a.safetensors", lightning())
    with pytest.raises(InvalidValueError, match=r"use a LoRA made for this size of Wan 2\.1"):
        VideoPipeline.open("Wan-AI/Wan2.1-T2V-14B-Diffusers", RuntimeConfig(mesh="single"), loras=[Lora(path)])


def test_a_lora_in_use_is_one_line(directory: Path) -> None:
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"), preset="4step")
    (line,) = (summarize(lora, pipeline.preset.presets) for lora in pipeline.loras.opened)
    assert line == "lora few.safetensors at strength 1: 32 of 32 modules fit, rank 4, made for preset 4step"
