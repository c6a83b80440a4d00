"""LoRA for Wan 2.2's two transformers: into the one that it is for, or into both, as diffusers does it."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import Lora, ResidencyConfig, RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import psnr
from tests.covering import covering
from tests.families import wan_pipelines
from tests.families.meshes import MESHES
from tests.families.test_wan import CHOSEN, chosen, text_tokens
from tests.pipeline import small_loras, small_pipeline
from tests.pipeline.small_loras import Tensors, error, loaded, write
from tests.pipeline.test_video import PROMPT

COMPONENTS = ("transformer", "transformer_2")
INTO = {"all": (True, True), "high": (True, False), "low": (False, True)}


def fused(*loras: Lora) -> WanPipeline:
    """diffusers' pipeline with the LoRAs in its weights."""
    reference = wan_pipelines.reference("2.2")
    own = {name: copy.deepcopy(getattr(reference, name)) for name in (*COMPONENTS, "scheduler")}
    parts = {name: getattr(reference, name) for name in ("tokenizer", "text_encoder", "vae")}
    pipeline = WanPipeline(**parts, **own, boundary_ratio=reference.config.boundary_ratio)
    pipeline.set_progress_bar_config(disable=True)
    for lora in loras:
        for second, component in enumerate(COMPONENTS):
            if INTO[lora.noise][second]:
                pipeline.load_lora_weights(
                    str(lora.path.parent),
                    weight_name=lora.path.name,
                    adapter_name="own",
                    load_into_transformer_2=bool(second),
                )
                pipeline.fuse_lora(components=[component], lora_scale=lora.strength)
                pipeline.unload_lora_weights()
    return pipeline


@functools.cache
def base(transformer: int) -> Tensors:
    return getattr(wan_pipelines.reference("2.2"), COMPONENTS[transformer]).state_dict()


@pytest.mark.default_cases("low-dp=2,sp=4", "high-dp=2,tp=4")
@covering("noise, mesh", INTO, MESHES, strength=1)
def test_only_the_transformer_that_it_is_for_changes(noise: str, mesh: str, tmp_path: Path) -> None:
    lora = Lora(write(tmp_path / "a.safetensors", small_loras.kohya_style()), 0.7, noise)
    expected = fused(lora)
    for transformer, component in enumerate(COMPONENTS):
        actual = loaded([lora], mesh, directory=wan_pipelines.directory("2.2"), transformer=transformer)
        assert error(actual, getattr(expected, component).state_dict()) < 1e-5
        if INTO[noise][transformer]:
            assert error(actual, base(transformer)) > 0.1
        else:
            assert error(actual, base(transformer)) == 0, "bit for bit the model's own"


def test_both_get_it_where_nothing_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", small_loras.diffusers_style())
    files = ModelFiles.open(wan_pipelines.directory("2.2"))
    assert open_loras([Lora(path)], files).key == open_loras([Lora(path, 1.0, "all")], files).key
    assert all(open_loras([Lora(path)], files).for_transformer(transformer).key for transformer in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=4"])
def test_the_video_is_that_of_diffusers_with_one_for_each(mesh: str, tmp_path: Path) -> None:
    high = write(tmp_path / "high.safetensors", small_loras.original_style(seed=1))
    low = write(tmp_path / "low.safetensors", small_loras.original_style(seed=2))
    pipeline = VideoPipeline.open(wan_pipelines.directory("2.2"), RuntimeConfig(mesh=mesh))
    settings = pipeline.settings(**chosen("2.2"))

    def video(*loras: Lora) -> torch.Tensor:
        pipeline.use_loras(loras)
        return torch.cat(list(pipeline.generate(PROMPT, settings)), dim=1)

    def reference(*loras: Lora) -> torch.Tensor:
        made = fused(*loras)(
            prompt=PROMPT,
            **{name: CHOSEN[name] for name in ("negative_prompt", "height", "width", "num_frames", "guidance_scale")},
            num_inference_steps=CHOSEN["num_inference_steps"],
            guidance_scale_2=2.5,
            generator=torch.Generator().manual_seed(CHOSEN["seed"]),
            output_type="pt",
            max_sequence_length=text_tokens("2.2"),
        )
        return made.frames.permute(0, 1, 3, 4, 2)

    pairs = ((Lora(high, 1.0, "high"), Lora(low, 1.0, "low")), (Lora(high, 1.0, "low"), Lora(low, 1.0, "high")))
    references = [reference(*pair) for pair in pairs]
    assert psnr(*references) < 35, "which of them gets it shows"
    assert psnr(video(*pairs[0]), references[0]) >= 100
    with count_compilations() as count:
        exchanged = video(*pairs[1])
    assert psnr(exchanged, references[1]) >= 100
    assert count.requested == 0


def test_the_transformer_without_it_is_not_loaded_again(tmp_path: Path) -> None:
    residency = Residency(ResidencyConfig())
    pipeline = VideoPipeline.open(wan_pipelines.directory("2.2"), RuntimeConfig(mesh="single"), residency=residency)
    settings = pipeline.settings(**chosen("2.2"))
    embeddings = pipeline.encode(PROMPT, settings)
    pipeline.denoise(embeddings, settings)
    loadings: list[str] = []
    pipeline.on_progress = lambda progress: loadings.append(progress.what) if progress.stage == "loading" else None
    pipeline.use_loras([Lora(write(tmp_path / "a.safetensors", small_loras.diffusers_style()), 1.0, "low")])
    pipeline.denoise(embeddings, settings)
    assert loadings
    assert all("transformer_2" in what for what in loadings)
    (label,) = [entry.label for entry in residency.entries() if "a.safetensors" in entry.label]
    assert label.endswith("transformer_2 + a.safetensors:1")


@pytest.mark.parametrize("noise", ["high", "low"])
def test_a_model_with_one_transformer_refuses_it(noise: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", small_loras.diffusers_style())
    for directory in (small_pipeline.directory(), wan_pipelines.directory("5B")):
        text = f"is for {noise} noise, but model .* has one transformer for all; leave {noise} out"
        with pytest.raises(InvalidValueError, match=text):
            open_loras([Lora(path, 1.0, noise)], ModelFiles.open(directory))


def test_another_noise_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", small_loras.diffusers_style())
    with pytest.raises(InvalidValueError, match="is for noise 'medium'; choose from all, high, low"):
        open_loras([Lora(path, 1.0, "medium")], ModelFiles.open(wan_pipelines.directory("2.2")))
