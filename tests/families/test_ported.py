"""What ported families share: CogVideoX's transformer, which writes into its queries and is given RoPE tables."""

import functools
import types
from typing import Any

import pytest
import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from safetensors.torch import save_file

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.shared.ported import by_pipeline, module_of, own_scheduler, own_text_length
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.parallel.rules import column, replicate, row
from comfy_tpu.pipeline.schedule import noise_levels
from comfy_tpu.porting.scaffold.small_pipeline import randomize_weights
from tests.parity.small_models import temporary_directory
from tests.tracing import relative_error

CONFIG: dict[str, Any] = {
    **dict.fromkeys(("in_channels", "out_channels", "num_attention_heads"), 4),
    "attention_head_dim": 16,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 9,
    "use_rotary_positional_embeddings": True,
}
TRANSFORMER = ComponentSpec(
    name="transformer",
    classes=("CogVideoXTransformer3DModel",),
    heads="num_attention_heads",
    build=module_of("CogVideoXTransformer3DModel"),
    stacks=(LayerStack("transformer_blocks", carry=("hidden_states", "encoder_hidden_states")),),
    rules=(
        column("transformer_blocks.*.attn1.to_[qkv].*"),
        row("transformer_blocks.*.attn1.to_out.0.weight"),
        replicate("transformer_blocks.*.attn1.to_out.0.bias"),
        replicate("transformer_blocks.*.attn1.norm_*"),
        column("transformer_blocks.*.norm[12].linear.*"),
        replicate("transformer_blocks.*.norm[12].norm.*"),
        column("transformer_blocks.*.ff.net.0.proj.*"),
        row("transformer_blocks.*.ff.net.2.weight"),
        replicate("transformer_blocks.*.ff.net.2.bias"),
        replicate("patch_embed.*"),
        replicate("time_embedding.*"),
        replicate("norm_*"),
        replicate("proj_out.*"),
    ),
)
METHOD = "_prepare_rotary_positional_embeddings"
FACTS = {"vae_scale_factor_spatial": 8}


@functools.cache
def reference() -> Any:
    torch.manual_seed(0)
    return randomize_weights(CogVideoXTransformer3DModel(**CONFIG), 2.0)


def predict(module: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> Any:
    tables = by_pipeline("CogVideoXPipeline", METHOD, module, FACTS, 48, 80, latents.shape[1], latents.device)
    return module(latents, text, timestep, image_rotary_emb=tables, return_dict=False)[0]


@pytest.mark.default_cases("dp=2,sp=4")
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,sp=4"])
def test_a_model_that_writes_into_its_queries(mesh: str) -> None:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 3, 4, 6, 10, generator=generator)
    text = torch.randn(2, 12, 32, generator=generator)
    directory = temporary_directory()
    save_file(reference().state_dict(), directory / "diffusion_pytorch_model.safetensors")
    component = Component(TRANSFORMER, CONFIG, make_placement(mesh), dtype=torch.float32)
    program = component.program(predict, input_axes={"latents": ("dp",), "text": ("dp",)})
    given = {"latents": latents, "timestep": torch.tensor([500.0]), "text": text}
    found = to_host(program(component.load(Checkpoint.open(directory)), **given))
    pipeline = types.SimpleNamespace(transformer=reference(), **FACTS)
    tables = getattr(CogVideoXPipeline, METHOD)(pipeline, 48, 80, 3, "cpu")
    wanted = reference()(latents, text, torch.tensor([500.0]), image_rotary_emb=tables, return_dict=False)[0]
    assert relative_error(found, wanted) <= 1e-5


def test_a_models_own_length_of_texts() -> None:
    assert own_text_length(lambda file: {"max_text_seq_length": 226}) == {"max_sequence_length": 226}
    assert own_text_length(lambda file: {}) == {}


def test_a_models_own_scheduler_goes_before_the_familys() -> None:
    read = own_scheduler("ddim", "CogVideoXDDIMScheduler")
    assert read(lambda file: {}) == {}
    own = read(lambda file: {"_class_name": "CogVideoXDDIMScheduler", "snr_shift_scale": 1.0})["ddim"]
    made = own(GenerationSettings(num_inference_steps=3))
    assert (made.config["snr_shift_scale"], len(made.timesteps)) == (1.0, 3)
    with pytest.raises(UnsupportedError, match="describes a DPM, and this family was written for a CogVideoXDDIM"):
        read(lambda file: {"_class_name": "DPM"})


def test_noise_levels_of_a_scheduler_without_sigmas() -> None:
    """A model directory's scheduler is checked by them when it is opened."""
    made = own_scheduler("ddim", "CogVideoXDDIMScheduler")(lambda file: {"snr_shift_scale": 1.0})["ddim"](
        GenerationSettings(num_inference_steps=4)
    )
    assert not hasattr(made, "sigmas")
    levels = noise_levels(made, 0, made.timesteps)
    assert 1 >= levels[0] > levels[-1] > 0
