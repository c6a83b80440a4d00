"""The names of ComfyUI's own modules, read by the converters of the families' single files.

A module of ComfyUI with random weights, of which the converted ones are loaded into diffusers' class: both must compute
the same. So a name that is taken for another one, or a half that is not swapped, is seen.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.bridge import build_skeleton, weight_shapes
from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.families.registry import load_family
from comfy_tpu.pipeline import single_files
from tests.native.architectures import ARCHITECTURES, Architecture, noise
from tests.native.vaes import VAES, SmallVae

pytestmark = pytest.mark.comfyui


def architecture(name: str) -> Architecture:
    return next(each for each in ARCHITECTURES if each.name == name)


def small_vae(name: str) -> SmallVae:
    return next(each for each in VAES if each.name == name)


class StateDict:
    """The state dict of a module, read as a file would be."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.path = Path("file.safetensors")
        self.read = tensors.__getitem__
        self.tensors = {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, self.path) for name, tensor in tensors.items()
        }


def load(module: Any, family: str, part: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Diffusers' module with the converted tensors: all of them, and no others."""
    file = load_family(family).single_files[part]
    source = file.open(StateDict(tensors), module.config, part)  # type: ignore[arg-type]
    module.load_state_dict({name: source.read(name) for name in source.tensors}, strict=True)
    return module.eval().requires_grad_(False)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("guided", [True, False], ids=["dev", "klein"])
def test_flux2(comfyui, guided):
    from diffusers import Flux2Transformer2DModel

    base = architecture("Flux.2")
    made = Architecture(base.name, base.model_class, {**base.config, "guidance_embed": guided}, base.latents, base.text)
    theirs = made.build().model.diffusion_model
    config = {"num_layers": 3, "num_single_layers": 3, "attention_head_dim": 32, "num_attention_heads": 4}
    ours = load(
        Flux2Transformer2DModel(**config, joint_attention_dim=64, axes_dims_rope=(8, 8, 8, 8), guidance_embeds=guided),
        "Flux.2 dev" if guided else "Flux.2 klein",
        "transformer",
        theirs.state_dict(),
    )
    latents, text, time, guidance = noise(1, 1, 128, 4, 6), noise(2, 1, 7, 64), torch.tensor([0.6]), torch.tensor([3.5])
    expected = theirs(latents, time, text, None, guidance)
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(6), torch.arange(1))
    words = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(7))
    found = ours(
        hidden_states=latents.flatten(2).transpose(1, 2),
        encoder_hidden_states=text,
        timestep=time,
        guidance=guidance if guided else None,
        img_ids=grid,
        txt_ids=words,
        return_dict=False,
    )[0]
    close(found.transpose(1, 2).unflatten(2, (4, 6)), expected)


def test_hunyuan_video(comfyui):
    from diffusers import HunyuanVideo15Transformer3DModel

    theirs = architecture("HunyuanVideo-1.5").build().model.diffusion_model
    ours = load(
        HunyuanVideo15Transformer3DModel(num_layers=3, num_attention_heads=2, text_embed_dim=64),
        "HunyuanVideo-1.5",
        "transformer",
        theirs.state_dict(),
    )
    latents, text, glyphs, image = (
        noise(seed, 1, *shape) for seed, shape in enumerate(((65, 2, 4, 6), (7, 64), (5, 1472), (9, 1152)))
    )
    time = torch.tensor([600.0])
    expected = theirs(latents, time, text, txt_byt5=glyphs, clip_fea=image)
    found = ours(
        hidden_states=latents,
        timestep=time,
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(1, 7),
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=torch.ones(1, 5),
        image_embeds=image,
        return_dict=False,
    )[0]
    close(found, expected)


def test_flux2_vae(comfyui):
    from diffusers import AutoencoderKLFlux2

    from comfy_tpu.families.flux2.reference import decode, encode

    theirs = small_vae("Flux.2").build().first_stage_model.float()
    module = AutoencoderKLFlux2(block_out_channels=(32, 64, 64, 64), layers_per_block=1)
    ours = load(module, "Flux.2 dev", "vae", theirs.state_dict())
    latents, pixels = noise(1, 1, 128, 4, 6), noise(2, 1, 3, 64, 96)
    close(decode(ours, latents.unsqueeze(2)).squeeze(2), theirs.decode(latents))
    close(encode(ours, pixels.unsqueeze(2)).squeeze(2), theirs.encode(pixels))


def test_hunyuan_video_vae(comfyui):
    from diffusers import AutoencoderKLHunyuanVideo15

    theirs = small_vae("HunyuanVideo-1.5").build().first_stage_model.float()
    module = AutoencoderKLHunyuanVideo15(
        latent_channels=32, block_out_channels=(32, 32, 64, 64, 64), layers_per_block=1
    )
    ours = load(module, "HunyuanVideo-1.5", "vae", theirs.state_dict())
    # One frame: over several, ComfyUI's attention looks ahead, and diffusers' does not.
    latents, pixels = noise(1, 1, 32, 1, 4, 6), noise(2, 1, 3, 1, 64, 96)
    close(ours.decode(latents, return_dict=False)[0], theirs.decode(latents))
    close(ours.encode(pixels, return_dict=False)[0].mode(), theirs.encode(pixels))


def test_ltx_video(comfyui):
    from comfy.ldm.lightricks.model import LTXVModel
    from comfy.ops import disable_weight_init
    from diffusers import LTXVideoTransformer3DModel

    with torch.device("meta"):
        theirs = LTXVModel(
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            cross_attention_dim=32,
            in_channels=16,
            caption_channels=24,
            operations=disable_weight_init,
        ).state_dict()
        ours = LTXVideoTransformer3DModel(
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            cross_attention_dim=32,
            in_channels=16,
            out_channels=16,
            caption_channels=24,
        )
        load(ours, "LTX-Video", "transformer", theirs)


@pytest.mark.parametrize("version", [0, 1, 2], ids=["0.9.0", "0.9.1", "0.9.5"])
def test_ltx_video_vae(comfyui, version):
    """Shapes and places of all three, which differ in their blocks; the names have the same order in both."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE
    from diffusers import AutoencoderKLLTXVideo

    from tests.pipeline.original_names import LTX_VAE_CONFIGS

    with torch.device("meta"):
        theirs = VideoVAE(version).state_dict()
        ours = AutoencoderKLLTXVideo(**list(LTX_VAE_CONFIGS.values())[version])
        load(ours, "LTX-Video", "vae", theirs)


ENCODERS = (
    ("Flux.2 dev", "text_encoder", "comfy.text_encoders.llama.Mistral3Small24B", None),
    ("Flux.2 klein", "text_encoder", "comfy.text_encoders.llama.Qwen3_4B", None),
    ("HunyuanVideo-1.5", "text_encoder", "comfy.text_encoders.llama.Qwen25_7BVLI", None),
    ("HunyuanVideo-1.5", "text_encoder_2", "comfy.text_encoders.t5.T5", "text_encoders/byt5_config_small_glyph.json"),
    (
        "HunyuanVideo-1.5 image-to-video",
        "image_encoder",
        "comfy.clip_model.CLIPVisionModelProjection",
        "clip_vision_siglip_384.json",
    ),
    ("LTX-Video", "text_encoder", "comfy.text_encoders.t5.T5", "text_encoders/t5_config_xxl.json"),
)


@pytest.mark.parametrize(("family", "part", "home", "described"), ENCODERS)
def test_encoders(comfyui, family, part, home, described, tmp_path):
    """ComfyUI's modules of the published sizes, without weights, and our published configurations."""
    import comfy
    from comfy.ops import disable_weight_init

    path, _, name = home.rpartition(".")
    config = json.loads((Path(comfy.__path__[0]) / described).read_text()) if described else {}
    theirs = getattr(importlib.import_module(path), name)(config, torch.bfloat16, "meta", disable_weight_init)
    model = load_family(family)
    (spec,) = (each for each in model.components if each.name == part)
    published = single_files._config(spec, model, tmp_path, next(iter(model.card.published)))
    found = model.single_files[part].open(StateDict(theirs.state_dict()), published, part).tensors
    shapes = {spec.rename(name) if spec.rename else name: info.shape for name, info in found.items()}
    ours = build_skeleton(lambda: spec.build(published))
    expected = {name: tuple(tensor.shape) for name, tensor in weight_shapes(ours).items()}
    expected.pop("encoder.embed_tokens.weight", None)
    assert {name: shapes.get(name) for name in expected} == expected
    if described is None:
        numbers = theirs.model.config
        assert ours.config.rope_parameters["rope_theta"] == numbers.rope_theta
        assert ours.config.rms_norm_eps == numbers.rms_norm_eps
