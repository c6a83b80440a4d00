"""LoRA against diffusers' own loading and fusing, over meshes; and what it must not do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.quantization import DTYPES, quantize_weight
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import Lora, ResidencyConfig, RuntimeConfig
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import assert_wrong_ones_differ, psnr
from tests.pipeline import small_loras, small_pipeline
from tests.pipeline.small_loras import error, loaded, write

MESHES = ["single", "dp=2,tp=4", "dp=2,sp=4"]


def base() -> dict[str, torch.Tensor]:
    return small_pipeline.reference().transformer.state_dict()


@pytest.mark.parametrize("style", small_loras.STYLES)
def test_weights_are_those_that_diffusers_fuses(style: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", small_loras.STYLES[style]())
    expected = small_loras.fused((path, 0.7))
    actual = loaded([Lora(path, 0.7)])
    assert error(actual, base()) > 0.1, "the LoRA does something"
    assert error(actual, expected) < 1e-5


def test_alpha_in_pefts_configuration_is_as_in_diffusers(tmp_path: Path) -> None:
    adapter = {
        "transformer.r": 4,
        "transformer.lora_alpha": 12,
        "transformer.alpha_pattern": {"attn1.to_q": 3},
        "transformer.target_modules": ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"],
    }
    path = write(tmp_path / "a.safetensors", small_loras.diffusers_style(), adapter)
    expected = small_loras.fused((path, 1.0))
    assert error(loaded([Lora(path)]), expected) < 1e-5


@pytest.mark.default_cases("dp=2,tp=4")
@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.slow] if mesh == "dp=2,sp=4" else []) for mesh in MESHES]
)
def test_two_at_once_with_strengths_of_their_own_on_every_mesh(mesh: str, tmp_path: Path) -> None:
    first = write(tmp_path / "a.safetensors", small_loras.kohya_style(rank=4))
    second = write(tmp_path / "b.safetensors", small_loras.original_style(rank=20, seed=2))
    expected = small_loras.fused((first, 0.8), (second, -0.5))
    assert error(loaded([Lora(first, 0.8), Lora(second, -0.5)], mesh), expected) < 1e-5
    assert error(loaded([Lora(first, 0.8)], mesh), expected) > 0.1


def test_a_file_may_leave_out_layers_and_add_differences_that_diffusers_drops(tmp_path: Path) -> None:
    kept = "lora_unet_blocks_1_self_attn_q."
    tensors = {key: tensor for key, tensor in small_loras.kohya_style().items() if key.startswith(kept)}
    del tensors[f"{kept}alpha"]
    tensors |= {
        "diffusion_model.blocks.2.norm3.diff": small_loras.random(96, seed=3),
        "diffusion_model.blocks.2.modulation.diff": small_loras.random(1, 6, 96, seed=4),
        "diffusion_model.patch_embedding.lora_down.weight": small_loras.random(2, 4, 1, 2, 2, seed=5),
        "diffusion_model.patch_embedding.lora_up.weight": small_loras.random(96, 2, 1, 1, 1, seed=6),
    }
    expected = {name: tensor.clone() for name, tensor in base().items()}
    up, down = (tensors[f"{kept}lora_{part}.weight"] for part in ("up", "down"))
    expected["blocks.1.attn1.to_q.weight"] += 0.5 * up @ down  # no alpha: as if it were the rank
    expected["blocks.2.norm2.weight"] += 0.5 * tensors["diffusion_model.blocks.2.norm3.diff"]
    expected["blocks.2.scale_shift_table"] += 0.5 * tensors["diffusion_model.blocks.2.modulation.diff"]
    up, down = (tensors[f"diffusion_model.patch_embedding.lora_{part}.weight"] for part in ("up", "down"))
    expected["patch_embedding.weight"] += 0.5 * torch.einsum("orxyz,rithw->oithw", up, down)
    actual = loaded([Lora(write(tmp_path / "a.safetensors", tensors), 0.5)], "dp=2,tp=4")
    assert error(actual, expected) < 1e-5
    assert set(small_loras.changed(actual, base())) == {
        "blocks.1.attn1.to_q.weight",
        "blocks.2.norm2.weight",
        "blocks.2.scale_shift_table",
        "patch_embedding.weight",
    }


def test_bfloat16_weights_are_rounded_once(tmp_path: Path) -> None:
    first = write(tmp_path / "a.safetensors", small_loras.diffusers_style())
    second = write(tmp_path / "b.safetensors", small_loras.comfy_style(seed=2))
    expected = small_loras.fused((first, 1.0), (second, 1.0))
    actual = loaded([Lora(first), Lora(second)], "dp=2,tp=4", dtype=torch.bfloat16)
    for name, tensor in expected.items():
        if name.endswith("to_q.weight"):
            assert np.mean(actual[name] != tensor.bfloat16().float().numpy()) < 1e-3, "but for ties"
    assert error(actual, expected) < 2**-8


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_weights_are_made_of_the_merged_ones(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", small_loras.original_style())
    expected = small_loras.fused((path, 0.7))
    actual = loaded([Lora(path, 0.7)], quantize=kind)
    name = "blocks.1.attn1.to_q.weight"
    small, scale = quantize_weight(expected[name], DTYPES[kind])
    np.testing.assert_allclose(actual[f"{name}_scale"], scale.numpy(), rtol=1e-5)
    assert np.mean(actual[name].astype(np.float32) != small.float().numpy()) < 1e-2, "but for ties"
    plain = {name: tensor for name, tensor in expected.items() if f"{name}_scale" not in actual}
    assert error(actual, plain) < 1e-5


def test_nothing_is_compiled_for_another_lora_and_the_base_is_exact_again(tmp_path: Path) -> None:
    residency = Residency(ResidencyConfig())
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="dp=2,tp=4"), residency=residency)
    settings = pipeline.settings(
        height=48, width=80, num_frames=9, num_inference_steps=2, guidance_scale=4.0, seed=7, max_sequence_length=16
    )
    embeddings = pipeline.encode("a red circle", settings)
    before = pipeline.denoise(embeddings, settings)
    first = write(tmp_path / "a.safetensors", small_loras.diffusers_style(rank=4))
    second = write(tmp_path / "b.safetensors", small_loras.kohya_style(rank=7, seed=2))
    pipeline.use_loras([Lora(first)])
    with_first = pipeline.denoise(embeddings, settings)
    results = []
    with count_compilations() as count:
        for loras in ([Lora(first, -0.5)], [Lora(second)], [Lora(first), Lora(second, 0.3)]):
            pipeline.use_loras(loras)
            results.append(pipeline.denoise(embeddings, settings))
        pipeline.use_loras([Lora(first, 0.0)])
        assert torch.equal(pipeline.denoise(embeddings, settings), before), "no strength is no LoRA"
        pipeline.use_loras([])
        residency.clear()  # so that the base is loaded again, beside nothing
        assert torch.equal(pipeline.denoise(embeddings, settings), before)
    assert count.requested == 0, "ranks 4, 7 and 11 are one program, and strengths are numbers"
    everything = [before, with_first, *results]
    assert not any(
        torch.allclose(one, other, atol=1e-3)
        for index, one in enumerate(everything)
        for other in everything[index + 1 :]
    )


@pytest.mark.thorough  # by default: another LoRA compiles nothing
def test_another_rank_compiles_merging_only(tmp_path: Path) -> None:
    heard: list[Progress] = []
    residency = Residency(ResidencyConfig())
    pipeline = VideoPipeline.open(
        small_pipeline.directory(), RuntimeConfig(mesh="single"), residency=residency, on_progress=heard.append
    )
    settings = pipeline.settings(
        height=48, width=80, num_frames=9, num_inference_steps=1, guidance_scale=1.0, max_sequence_length=16
    )
    embeddings = pipeline.encode("a red circle", settings)
    before = pipeline.denoise(embeddings, settings)
    heard.clear()
    residency.clear()
    pipeline.use_loras([Lora(write(tmp_path / "a.safetensors", small_loras.kohya_style(rank=40)), 0.5)])
    after = pipeline.denoise(embeddings, settings)
    assert not torch.allclose(before, after, atol=1e-3)
    assert [event for event in heard if event.stage == "compiling"] == []
    assert "transformer + a.safetensors:0.5" in residency.entries()[-1].label


def test_a_file_that_changes_under_its_name_is_another_lora(tmp_path: Path) -> None:
    files = ModelFiles.open(small_pipeline.directory())
    path = write(tmp_path / "a.safetensors", small_loras.kohya_style(seed=1))
    first = open_loras([Lora(path)], files)
    write(path, small_loras.kohya_style(seed=2))
    second = open_loras([Lora(path)], files)
    assert first.key != second.key
    assert first.text != second.text
    assert open_loras([Lora(path, 0.5)], files).key != second.key
    assert open_loras([Lora(path, 0)], files).text == ""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["single", pytest.param("dp=2,tp=4", marks=pytest.mark.slow)])
def test_four_steps_without_guidance_are_those_of_diffusers(mesh: str, tmp_path: Path) -> None:
    """As LoRAs are run that were distilled to few steps: --steps 4 --guidance-scale 1 --scheduler euler."""
    path = write(tmp_path / "a.safetensors", small_loras.original_style())
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh=mesh), loras=[Lora(path)])
    chosen = {
        "height": 48,
        "width": 80,
        "num_frames": 9,
        "num_inference_steps": 4,
        "guidance_scale": 1.0,
        "max_sequence_length": 16,
    }
    settings = pipeline.settings(**chosen, scheduler="euler", flow_shift=5.0, seed=7)
    assert pipeline.plan(settings).forwards == 4, "one branch"
    embeddings = pipeline.encode("a red circle", settings)
    assert embeddings.negative is None, "nobody reads it"
    actual = torch.cat(list(pipeline.decode(pipeline.denoise(embeddings, settings), settings)), dim=1)

    def reference(shift: float, *loras: tuple[Path, float], prompt: str = "a red circle") -> torch.Tensor:
        own = small_loras.pipeline(*loras, scheduler=FlowMatchEulerDiscreteScheduler(shift=shift))
        generator = torch.Generator().manual_seed(7)
        made = own(prompt, **chosen, generator=generator, output_type="pt")
        return made.frames.permute(0, 1, 3, 4, 2)

    expected = reference(5.0, (path, 1.0))
    assert psnr(actual, expected) >= 120, "138 are found"
    assert_wrong_ones_differ(expected, 35, no_lora=reference(5.0))
    assert_wrong_ones_differ(
        expected,
        100,
        weaker=reference(5.0, (path, 0.99)),
        shift=reference(1.0, (path, 1.0)),
        prompt=reference(5.0, (path, 1.0), prompt="a blue circle"),
    )
