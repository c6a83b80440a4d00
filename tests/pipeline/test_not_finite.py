"""NaN and infinity in weights, embeddings and latents are refused where they enter and where they leave a stage."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfy_tpu.config import GenerationSettings, Lora, RuntimeConfig
from comfy_tpu.errors import CheckpointError, InvalidValueError, NotFiniteError
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.video import VideoPipeline
from tests.pipeline import small_pipeline

SIZE = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}

FILES = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(small_pipeline.directory(), tmp_path / "model")


def rewrite(directory: Path, part: str, name: str, change: Callable[[torch.Tensor], None]) -> None:
    path = directory / part / FILES[part]
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, {"format": "pt"})


def poison(value: float) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1)[tensor.numel() // 2] = value

    return change


def fill(value: float) -> Callable[[torch.Tensor], None]:
    return lambda tensor: tensor.fill_(value)


def open_pipeline(directory: Path, **options: object) -> tuple[VideoPipeline, GenerationSettings]:
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"), **options)
    return pipeline, pipeline.settings(**SIZE)


WEIGHTS = {
    "transformer": "blocks.1.attn1.to_k.weight",
    "vae": "decoder.conv_in.weight",
    "text_encoder": "encoder.block.0.layer.0.SelfAttention.k.weight",
}


@pytest.mark.default_cases("nan-vae", "inf-transformer", "nan-text_encoder")
@pytest.mark.parametrize("part", WEIGHTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights(directory: Path, part: str, value: float) -> None:
    rewrite(directory, part, WEIGHTS[part], poison(value))
    pipeline, settings = open_pipeline(directory)
    with pytest.raises(CheckpointError, match=rf"{FILES[part]}: {WEIGHTS[part]} holds NaN or infinity; download"):
        list(pipeline.generate("a red circle", settings))


def test_what_the_text_encoder_makes(directory: Path) -> None:
    """Finite weights that are too large: the product is what overflows."""
    rewrite(directory, "text_encoder", "encoder.final_layer_norm.weight", fill(3e38))
    pipeline, settings = open_pipeline(directory)
    with pytest.raises(NotFiniteError, match=r"the text_encoder gave NaN or infinity \(text, computed in float32\)"):
        pipeline.encode("a red circle", settings)


def test_keys_that_overflow_are_found_after_the_first_step(directory: Path) -> None:
    """They came out as a plausible video when a row of NaN counted as one that sees no key."""
    rewrite(directory, "transformer", "blocks.0.attn1.norm_k.weight", fill(3e38))
    pipeline, settings = open_pipeline(directory)
    embeddings = pipeline.encode("a red circle", settings)
    with pytest.raises(NotFiniteError, match=r"the first step gave NaN or infinity \(latents, computed in float32\)"):
        pipeline.denoise(embeddings, settings)


@pytest.mark.thorough  # by default: weights that are not finite
def test_what_the_decoder_makes(directory: Path) -> None:
    rewrite(directory, "vae", "decoder.norm_out.gamma", fill(3e38))
    pipeline, settings = open_pipeline(directory)
    with pytest.raises(NotFiniteError, match="the VAE's decoder gave NaN or infinity"):
        list(pipeline.decode(torch.ones(pipeline.latent_shape(settings)), settings))


@pytest.mark.parametrize("branch", ["positive", "negative"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_embeddings_that_are_given(branch: str, value: float) -> None:
    pipeline, settings = open_pipeline(small_pipeline.directory())
    rows = {"text": torch.zeros(1, 16, 16)}
    embeddings = PromptEmbeddings("x", rows, rows)
    embeddings = dataclasses.replace(embeddings, **{branch: {"text": torch.full((1, 16, 16), value)}})
    with pytest.raises(InvalidValueError, match=r"embeddings hold NaN or infinity \(text\); encode the prompt again"):
        pipeline.denoise(embeddings, settings)


@pytest.mark.default_cases("1e+38-1.0", "1.0-1e+20")
@pytest.mark.parametrize(("strength", "size"), [(1.0, 1e20), (1.0, 1e12), (1e38, 1.0), (-1e300, 1.0)])
def test_a_lora_that_overflows(tmp_path: Path, strength: float, size: float) -> None:
    path = tmp_path / "a.safetensors"
    name = "transformer.blocks.0.attn1.to_k"
    width = small_pipeline.reference().transformer.blocks[0].attn1.to_k.weight.shape[0]
    factors = {"lora_A": torch.full((4, width), size), "lora_B": torch.full((width, 4), size)}
    save_file({f"{name}.{part}.weight": tensor for part, tensor in factors.items()}, path)
    pipeline, settings = open_pipeline(small_pipeline.directory(), loras=[Lora(path, strength)])
    with pytest.raises(
        InvalidValueError, match=r"changes blocks.0.attn1.to_k.weight by up to .* at strength .*; use a smaller"
    ):
        list(pipeline.generate("a red circle", settings))
