"""Models in single files, under the original authors' names, against the same models in diffusers' directories."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comfy_tpu.config import RuntimeConfig, SingleFiles
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.families.registry import load_family
from comfy_tpu.families.wan.single_files import SINGLE_FILES as WAN_FILES
from comfy_tpu.pipeline import single_files
from comfy_tpu.pipeline.single_files import open_model
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import small_flux
from tests.parity import small_models
from tests.pipeline import original_names, small_pipeline
from tests.pipeline.single_file_models import SIZES, bare, changed_file, header, tensors, video, weights


@functools.cache
def wan() -> SingleFiles:
    directory, target = small_pipeline.directory(), small_models.temporary_directory()
    transformer = original_names.wan_transformer(weights(directory, "transformer"))
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in transformer.items()}
    encoder = {**weights(directory, "text_encoder"), "spiece_model": torch.zeros(8, dtype=torch.uint8)}
    return SingleFiles(
        (original_names.save(target / "transformer.safetensors", prefixed),),
        (original_names.save(target / "umt5.safetensors", encoder),),
        original_names.save(
            target / "vae.safetensors", original_names.wan_vae(weights(directory, "vae"), wan_resnets())
        ),
        base=str(bare(directory)),
    )


def wan_resnets() -> int:
    return int(small_pipeline.reference().vae.config.num_res_blocks) + 1


@functools.cache
def flux() -> SingleFiles:
    directory, target = small_flux.directory("dev"), small_models.temporary_directory()
    clip = {**weights(directory, "text_encoder"), "text_projection.weight": torch.zeros(24, 24)}
    clip = {
        name if "." not in name or name.startswith("text_") else f"text_model.{name}": each
        for name, each in clip.items()
    }
    return SingleFiles(
        (original_names.save(target / "flux.sft", original_names.flux_transformer(weights(directory, "transformer"))),),
        (
            original_names.save(target / "t5.safetensors", weights(directory, "text_encoder_2")),
            original_names.save(target / "clip_l.safetensors", clip),
        ),
        original_names.save(target / "ae.safetensors", original_names.ldm_vae(weights(directory, "vae"), 4)),
        base=str(bare(directory)),
    )


@pytest.mark.thorough  # by default: the tensors are those of the directory, test_single_file_families.py
def test_a_wan_video_is_that_of_the_directory_bit_for_bit() -> None:
    expected = video(small_pipeline.directory(), num_frames=5)
    assert expected.std() > 0
    assert torch.equal(video(wan(), num_frames=5), expected)


@pytest.mark.slow  # by default: a video of Wan above, the tensors of Flux in test_single_file_families.py
def test_a_flux_image_is_that_of_the_directory_bit_for_bit() -> None:
    expected = video(small_flux.directory("dev"))
    assert expected.std() > 0
    assert torch.equal(video(flux()), expected)


def test_the_original_names_of_umt5_are_read(tmp_path: Path) -> None:
    own = weights(small_pipeline.directory(), "text_encoder")
    own.pop("encoder.embed_tokens.weight", None)
    path = original_names.save(tmp_path / "umt5.safetensors", original_names.umt5(own))
    read = tensors(open_model(dataclasses.replace(wan(), text_encoders=(path,))), "text_encoder")
    assert set(read) == set(own)
    assert all(torch.equal(read[name], own[name]) for name in own)


def test_scaled_fp8_is_multiplied_out(tmp_path: Path) -> None:
    own = weights(small_flux.directory("dev"), "transformer")
    scaled = original_names.scaled_fp8(original_names.flux_transformer(own))
    path = original_names.save(tmp_path / "flux.safetensors", scaled)
    read = tensors(open_model(dataclasses.replace(flux(), transformers=(path,))), "transformer")
    assert set(read) == set(own)
    for name in own:  # the least significant of fp8's four bits is 1/16 of a value; small values have fewer
        torch.testing.assert_close(
            read[name].float(), own[name].float(), rtol=1 / 16, atol=float(own[name].abs().max()) / 200
        )
    query = "transformer_blocks.0.attn.to_q.weight"
    packed = scaled["double_blocks.0.img_attn.qkv.weight"].chunk(3)[0].float()
    expected = packed * scaled["double_blocks.0.img_attn.qkv.scale_weight"]
    assert torch.equal(read[query], expected.bfloat16())
    assert not torch.equal(read[query].float(), own[query].float())


def test_only_what_a_tensor_needs_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(flux())
    source = model.checkpoint(model.family.transformer)
    names: list[str] = []
    read = source._source.read  # type: ignore[attr-defined]
    monkeypatch.setattr(source._source, "read", lambda name: names.append(name) or read(name))  # type: ignore[attr-defined]
    for part in ("to_q", "to_k", "to_v"):
        source.read(f"transformer_blocks.1.attn.{part}.weight")
    assert names == ["double_blocks.1.img_attn.qkv.weight"], "one tensor of the file, read once"


@functools.cache
def pair_directory() -> Path:
    """A base model with two transformers."""
    path = small_models.temporary_directory()
    shutil.copytree(bare(small_pipeline.directory()), path, dirs_exist_ok=True)
    shutil.copytree(path / "transformer", path / "transformer_2")
    index = json.loads((path / "model_index.json").read_text())
    index |= {"boundary_ratio": 0.875, "transformer_2": index["transformer"]}
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def test_two_transformers_are_for_high_and_for_low_noise(tmp_path: Path) -> None:
    (high,) = wan().transformers
    low = original_names.save(tmp_path / "low.safetensors", {name: 2 * each for name, each in load_file(high).items()})
    model = open_model(dataclasses.replace(wan(), transformers=(high, low), base=str(pair_directory())))
    assert (model.family.name, model.defaults.boundary) == ("Wan 2.2", 0.875)
    first, second = tensors(model, "transformer"), tensors(model, "transformer_2")
    assert all(torch.equal(2 * first[name], second[name]) for name in first)


ORIGINAL = {"Wan": original_names.wan_transformer, "Flux": original_names.flux_transformer}


@pytest.mark.default_cases(
    "Wan 2.1-Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "Wan 2.2 5B-Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "Flux.1 dev-black-forest-labs/FLUX.1-dev",
    "Flux.1 schnell-black-forest-labs/FLUX.1-schnell",
)
@pytest.mark.parametrize(
    ("model", "hub_id"),
    [
        ("Wan 2.1", "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        ("Wan 2.1", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        ("Wan 2.1 image-to-video", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
        pytest.param("Wan 2.1 first and last frame", "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", marks=pytest.mark.slow),
        pytest.param("Wan 2.2", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", marks=pytest.mark.slow),
        ("Wan 2.2 image-to-video", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
        ("Wan 2.2 5B", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"),
        ("Flux.1 dev", "black-forest-labs/FLUX.1-dev"),
        ("Flux.1 schnell", "black-forest-labs/FLUX.1-schnell"),
    ],
)
def test_the_shapes_tell_which_published_model_a_file_is(model: str, hub_id: str) -> None:
    count = load_family(model).card.transformer_count
    file = header(model, hub_id, ORIGINAL[re.split(r"[ .]", model)[0]])
    assert single_files._detect([file] * count, [])[0] == hub_id


def test_a_published_part_has_its_configuration_without_a_directory(tmp_path: Path) -> None:
    for model, hub_id in (
        ("Wan 2.1 image-to-video", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
        ("Wan 2.2 5B", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"),
        ("Flux.1 schnell", "black-forest-labs/FLUX.1-schnell"),
    ):
        family = load_family(model)
        configs = {spec.name: single_files._config(spec, family, tmp_path, hub_id, ()) for spec in family.components}
        mean, deviation = family.vae.latent_statistics(configs["vae"])
        assert len(mean) == len(deviation) == family.vae.latent_channels(configs["vae"])
        assert len(set(deviation)) > 1 or model.startswith("Flux")


def test_the_names_of_the_5b_vae() -> None:
    """As its authors' file has them; diffusers has the same blocks in groups."""
    expected = {
        "encoder.conv1.weight": "encoder.conv_in.weight",
        "encoder.downsamples.1.downsamples.0.residual.2.weight": "encoder.down_blocks.1.resnets.0.conv1.weight",
        "encoder.downsamples.1.downsamples.0.shortcut.bias": "encoder.down_blocks.1.resnets.0.conv_shortcut.bias",
        "encoder.downsamples.1.downsamples.2.time_conv.weight": "encoder.down_blocks.1.downsampler.time_conv.weight",
        "encoder.downsamples.1.downsamples.2.resample.1.bias": "encoder.down_blocks.1.downsampler.resample.1.bias",
        "decoder.upsamples.2.upsamples.1.residual.6.bias": "decoder.up_blocks.2.resnets.1.conv2.bias",
        "decoder.upsamples.0.upsamples.3.resample.1.weight": "decoder.up_blocks.0.upsampler.resample.1.weight",
        "decoder.middle.1.to_qkv.weight": "decoder.mid_block.attentions.0.to_qkv.weight",
        "decoder.head.2.weight": "decoder.conv_out.weight",
        "conv2.weight": "post_quant_conv.weight",
    }
    converted = WAN_FILES["vae"].convert({name: torch.empty(1) for name in expected}, {})
    assert list(converted) == list(expected.values())


def test_missing_and_foreign_tensors_are_found_before_weights_are_loaded(tmp_path: Path) -> None:
    def damage(content: dict[str, torch.Tensor]) -> None:
        del content["model.diffusion_model.blocks.1.ffn.0.bias"]
        content["model.diffusion_model.extra.weight"] = torch.zeros(1)

    path = changed_file(tmp_path / "damaged.safetensors", wan().transformers[0], damage)
    pipeline = VideoPipeline.open(dataclasses.replace(wan(), transformers=(path,)), RuntimeConfig(mesh="single"))
    with pytest.raises(ComfyTpuError) as error:
        pipeline.encode_text("a red circle", pipeline.settings(**SIZES, num_frames=5))
    assert "missing from the checkpoint: blocks.1.ffn.net.0.proj.bias" in str(error.value)
    assert "the model has no place for them: extra.weight" in str(error.value)


def touched(path: Path) -> Path:
    path.write_bytes(b"x")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda at: {"vae": wan().transformers[0]},
            r"transformer.safetensors holds no Wan 2.1 vae: it has .*; choose the",
        ),
        (lambda at: {"transformers": (wan().vae,)}, r"vae.safetensors holds no Wan 2.1 transformer"),
        (
            lambda at: {"transformers": (wan().vae,), "base": None},
            r"vae.safetensors is no transformer that is known here",
        ),
        (lambda at: {"transformers": flux().transformers}, r"flux.sft holds no Wan 2.1 transformer"),
        (lambda at: {"base": None}, r"has the names of a known transformer, but the shapes of no published one"),
        (lambda at: {"text_encoders": ()}, r"Wan 2.1 needs a text encoder file with encoder\.block"),
        (lambda at: {"text_encoders": (wan().vae,)}, r"needs a text encoder file .*; vae.safetensors is none"),
        (lambda at: {"text_encoders": 2 * wan().text_encoders}, r"umt5.safetensors is one text encoder too many"),
        (lambda at: {"image_encoder": wan().vae}, r"Wan 2.1 has no image encoder; leave it out"),
        (lambda at: {"transformers": 2 * wan().transformers}, r"Wan 2.1 has one transformer, and 2 is given"),
        (lambda at: {"base": str(pair_directory())}, r"Wan 2.2 has two transformers, for high and for low noise"),
        (lambda at: {"vae": touched(at / "a.gguf")}, r"a.gguf is a GGUF file.*use the model's safetensors file"),
        (lambda at: {"vae": touched(at / "a.pt")}, r"a.pt is not read: such files are pickles"),
        (lambda at: {"vae": touched(at / "a.ckpt")}, r"a.ckpt is not read: such files are pickles"),
        (lambda at: {"vae": touched(at / "a.safetensors")}, r"a.safetensors cannot be read as safetensors"),
        (lambda at: {"vae": at / "none.safetensors"}, r"none.safetensors does not exist"),
        (lambda at: {"vae": at}, r"is a directory; give one .safetensors file"),
        (lambda at: {"base": str(at / "none")}, r"none is not a directory; give the directory or hub id"),
        (
            lambda at: {"vae": original_names.save(at / "int8.safetensors", quantized(load_file(wan().vae)))},
            r"int8.safetensors holds conv1.weight as int8, a quantization that is not read here",
        ),
    ],
)
def test_files_that_are_no_model_are_refused_in_one_sentence(
    change: Callable[[Path], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ComfyTpuError) as error:
        open_model(dataclasses.replace(wan(), **change(tmp_path)))
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def quantized(content: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**content, "conv1.weight": content["conv1.weight"].to(torch.int8)}


def test_a_missing_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    shutil.copytree(bare(small_pipeline.directory()), tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(ComfyTpuError, match=r"lacks tokenizer, which single files do not hold; download them"):
        open_model(dataclasses.replace(wan(), base=str(tmp_path)))
