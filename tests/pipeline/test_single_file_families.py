"""Flux.2, HunyuanVideo-1.5, LTX-Video, Z-Image and Qwen-Image in single files, against diffusers' directories.

That the files written here have the names of published ones is checked by diffusers' own converters, where it has one,
and by ComfyUI's own modules in tests/native/test_single_files.py.
"""

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
from diffusers import AutoencoderKLLTXVideo
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file

from comfy_tpu.bridge import build_skeleton, weight_shapes
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.config import RuntimeConfig, SingleFiles
from comfy_tpu.errors import ComfyTpuError, UnsupportedError
from comfy_tpu.families.ltx_video.single_files import SINGLE_FILES as LTX_FILES
from comfy_tpu.families.registry import load_family
from comfy_tpu.pipeline import single_files
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.single_files import open_model
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import (
    small_flux,
    small_flux2,
    small_hunyuan,
    small_hunyuan_image,
    small_ltx,
    small_qwen_image,
    small_z_image,
)
from tests.parity import small_models
from tests.pipeline import original_names
from tests.pipeline.original_names import LTX_VAE_CONFIGS, Tensors, save
from tests.pipeline.single_file_models import SIZES, bare, changed_file, header, tensors, video, weights

LTX_SIZES = {"num_frames": 9, "max_sequence_length": small_ltx.TEXT_TOKENS}
HUNYUAN_SIZES = {"num_frames": 5, "max_sequence_length": small_hunyuan.TEXT_TOKENS}


def language_model(own: Tensors) -> Tensors:
    """The language model of a text encoder as ComfyUI's files have it: alone, after "model."."""
    stripped = {re.sub(r"^(model\.|language_model\.)+", "", name): tensor for name, tensor in own.items()}
    return {f"model.{name}": each for name, each in stripped.items() if name.startswith(("layers.", "embed_", "norm."))}


@functools.cache
def flux2(variant: str) -> SingleFiles:
    directory, target = small_flux2.directory(variant), small_models.temporary_directory()
    text = language_model(weights(directory, "text_encoder"))
    if variant == "dev":  # ComfyUI's has no more layers than are used, and the tokenizer as bytes
        text = {name: each for name, each in text.items() if not re.match(r"model\.(norm|layers\.3\d)\.", name)}
        text["tekken_model"] = torch.zeros(8, dtype=torch.uint8)
    return SingleFiles(
        (save(target / "flux2.safetensors", original_names.flux2_transformer(weights(directory, "transformer"))),),
        (save(target / "text.safetensors", text),),
        save(target / "flux2-vae.safetensors", original_names.flux2_vae(weights(directory, "vae"), 4)),
        base=str(bare(directory)),
    )


@functools.cache
def hunyuan(*, comfyui: bool = False, image: bool = False) -> SingleFiles:
    directory = (small_hunyuan_image if image else small_hunyuan).directory()
    target = small_models.temporary_directory()
    transformer = original_names.hunyuan_transformer(weights(directory, "transformer"), comfyui=comfyui)
    text = language_model({f"model.{name}": each for name, each in weights(directory, "text_encoder").items()})
    text |= {"visual.patch_embed.proj.weight": torch.zeros(4, 4), "lm_head.weight": torch.zeros(4, 4)}
    seen = {f"vision_model.{name}": each for name, each in weights(directory, "image_encoder").items()} if image else {}
    return SingleFiles(
        (save(target / "hunyuan.safetensors", transformer),),
        (
            save(target / "byt5.safetensors", weights(directory, "text_encoder_2")),
            save(target / "qwen.safetensors", text),
        ),
        save(target / "vae.safetensors", original_names.hunyuan_vae(weights(directory, "vae"))),
        save(target / "sigclip.safetensors", seen) if image else None,
        base=str(bare(directory)),
    )


@functools.cache
def ltx() -> SingleFiles:
    """Transformer and VAE in one file, as it was published."""
    directory, target = small_ltx.directory(), small_models.temporary_directory()
    transformer = original_names.ltx_transformer(weights(directory, "transformer"))
    vae = original_names.ltx_vae(weights(directory, "vae"))
    vae |= {f"per_channel_statistics.{name}": torch.zeros(6) for name in ("channel", "mean-of-stds")}
    whole = {f"model.diffusion_model.{name}": each for name, each in transformer.items()}
    path = save(target / "ltx.safetensors", whole | {f"vae.{name}": each for name, each in vae.items()})
    return SingleFiles(
        (path,),
        (save(target / "t5.safetensors", weights(directory, "text_encoder")),),
        path,
        base=str(bare(directory)),
    )


@functools.cache
def z_image() -> SingleFiles:
    directory, target = small_z_image.directory("turbo"), small_models.temporary_directory()
    transformer = original_names.z_image_transformer(weights(directory, "transformer"))
    return SingleFiles(
        (
            save(
                target / "z_image.safetensors",
                {f"model.diffusion_model.{name}": each for name, each in transformer.items()},
            ),
        ),
        (save(target / "qwen3.safetensors", language_model(weights(directory, "text_encoder"))),),
        save(target / "ae.safetensors", original_names.ldm_vae(weights(directory, "vae"), 4)),
        base=str(bare(directory)),
    )


@functools.cache
def qwen_image(variant: str) -> SingleFiles:
    """As ComfyUI has them; a later Edit is marked by an empty tensor."""
    directory, target = small_qwen_image.directory(variant), small_models.temporary_directory()
    marker = {"__index_timestep_zero__": torch.zeros(0)} if variant == "2511" else {}
    text = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): each
        for name, each in weights(directory, "text_encoder").items()
    }
    return SingleFiles(
        (save(target / "qwen_image.safetensors", weights(directory, "transformer") | marker),),
        (save(target / "qwen_vl.safetensors", text),),
        save(target / "vae.safetensors", original_names.wan_vae(weights(directory, "vae"), 2)),
        base=str(bare(directory)),
    )


CASES: dict[str, tuple[Callable[[], SingleFiles], Callable[[], Path]]] = {
    "Flux.2 dev": (lambda: flux2("dev"), lambda: small_flux2.directory("dev")),
    "Flux.2 klein": (lambda: flux2("klein"), lambda: small_flux2.directory("klein")),
    "Flux.2 klein base": (lambda: flux2("base"), lambda: small_flux2.directory("base")),
    "HunyuanVideo-1.5": (hunyuan, small_hunyuan.directory),
    "HunyuanVideo-1.5, ComfyUI": (lambda: hunyuan(comfyui=True), small_hunyuan.directory),
    "HunyuanVideo-1.5 image-to-video": (lambda: hunyuan(image=True), small_hunyuan_image.directory),
    "LTX-Video": (ltx, small_ltx.directory),
    "Z-Image Turbo": (z_image, lambda: small_z_image.directory("turbo")),
    "Qwen-Image": (lambda: qwen_image("image"), lambda: small_qwen_image.directory("image")),
    "Qwen-Image-Edit": (lambda: qwen_image("edit"), lambda: small_qwen_image.directory("edit")),
    "Qwen-Image-Edit Plus": (lambda: qwen_image("2511"), lambda: small_qwen_image.directory("2511")),
}


def module_tensors(model: ModelFiles, spec: ComponentSpec) -> Tensors:
    """The tensors that the component loads, by the names of its modules."""
    read = tensors(model, spec.name)
    named = {spec.rename(name) if spec.rename else name: each for name, each in read.items()}
    skeleton = build_skeleton(lambda: spec.build(model.config(spec)))
    return {name: named[name] for name in weight_shapes(skeleton) if name != "encoder.embed_tokens.weight"}


# By default one of those whose transformers have the same names.
ALIKE = {"Flux.2 klein", "Flux.2 klein base", "Qwen-Image-Edit", "HunyuanVideo-1.5"}


def each_case(*slow: str) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in {*ALIKE, *slow} else []) for name in CASES]


@pytest.mark.default_cases("LTX-Video", "Qwen-Image", "Flux.2 dev")
@pytest.mark.parametrize("case", each_case())
def test_all_parts_have_the_tensors_of_the_directory(case: str) -> None:
    files, directory = CASES[case]
    model, expected = open_model(files()), ModelFiles.open(directory())
    assert model.family.name == expected.family.name == case.partition(",")[0]
    for spec in model.family.components:
        found, wanted = module_tensors(model, spec), module_tensors(expected, spec)
        assert len(found) > 5
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), spec.name
    assert model.defaults == expected.defaults


@pytest.mark.default_cases("LTX-Video")
@pytest.mark.parametrize("case", [case for case in each_case("Qwen-Image", "Flux.2 dev") if "," not in case.values[0]])
def test_the_files_of_a_directory_are_read_under_their_own_names(case: str) -> None:
    path = CASES[case][1]()
    expected = ModelFiles.open(path)

    def files(*parts: ComponentSpec) -> tuple[Path, ...]:
        return tuple(found for part in parts for found in (path / part.name).glob("*.safetensors"))

    family = expected.family
    image = family.media.encoder if family.media is not None else None
    given = SingleFiles(
        files(*family.denoiser.transformers),
        files(*(encoder.component for encoder in family.text.encoders)),
        *files(family.vae.component),
        *(files(image) if image is not None else ()),
        base=str(bare(path)),
    )
    model = open_model(given)
    for spec in family.components:
        found, wanted = module_tensors(model, spec), module_tensors(expected, spec)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), spec.name


@pytest.mark.slow
def test_a_flux2_image_is_that_of_the_directory_bit_for_bit() -> None:
    expected = video(small_flux2.directory("klein"))
    assert expected.std() > 0
    assert torch.equal(video(flux2("klein")), expected)


@pytest.mark.slow
def test_a_hunyuan_video_is_that_of_the_directory_bit_for_bit() -> None:
    expected = video(small_hunyuan.directory(), **HUNYUAN_SIZES)
    assert expected.std() > 0
    assert torch.equal(video(hunyuan(comfyui=True), **HUNYUAN_SIZES), expected)


@pytest.mark.slow
def test_an_ltx_video_is_that_of_the_directory_bit_for_bit() -> None:
    expected = video(small_ltx.directory(), **LTX_SIZES)
    assert expected.std() > 0
    assert torch.equal(video(ltx(), **LTX_SIZES), expected)


def test_diffusers_reads_the_same_transformers() -> None:
    for own, written, convert in (
        (
            weights(small_flux2.directory("dev"), "transformer"),
            load_file(flux2("dev").transformers[0]),
            single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
        ),
        (
            weights(small_ltx.directory(), "transformer"),
            load_file(ltx().transformers[0]),
            single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
        ),
        (
            weights(small_z_image.directory("turbo"), "transformer"),
            load_file(z_image().transformers[0]),
            single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
        ),
    ):
        converted = convert(written)
        assert set(converted) == set(own)
        assert all(torch.equal(converted[name], own[name]) for name in own)


@pytest.mark.parametrize("version", LTX_VAE_CONFIGS)
def test_the_vaes_of_three_versions_of_ltx_video(version: str) -> None:
    """At their published widths, by which diffusers' converter tells them apart."""
    with torch.device("meta"):
        own = AutoencoderKLLTXVideo(**LTX_VAE_CONFIGS[version]).state_dict()
    named = original_names.ltx_vae(own, version)
    whole = {f"vae.{name}": tensor for name, tensor in named.items()}
    theirs = single_file_utils.convert_ltx_vae_checkpoint_to_diffusers(whole)
    ours = LTX_FILES["vae"].convert(named, LTX_VAE_CONFIGS[version])
    for converted in (theirs, ours):
        assert set(converted) == set(own)
        assert all(converted[name] is own[name] for name in own)


ORIGINAL = {
    "Flux.2 dev": original_names.flux2_transformer,
    "Flux.2 klein": original_names.flux2_transformer,
    "HunyuanVideo-1.5": original_names.hunyuan_transformer,
    "LTX-Video": original_names.ltx_transformer,
    "Z-Image Turbo": original_names.z_image_transformer,
    "Qwen-Image-Edit": dict,
}


def test_the_shapes_tell_flux2_dev_and_ltx_video() -> None:
    for model, hub_id in (("Flux.2 dev", "black-forest-labs/FLUX.2-dev"), ("LTX-Video", "Lightricks/LTX-Video")):
        assert single_files._detect([header(model, hub_id, ORIGINAL[model])], [])[0] == hub_id


@pytest.mark.parametrize(
    ("model", "hub_id", "message"),
    [
        (
            "Flux.2 klein",
            "black-forest-labs/FLUX.2-klein-4B",
            r"may be a Flux.2 klein or a Flux.2 klein base, which have the same shapes; say which: "
            r"black-forest-labs/FLUX.2-klein-4B or black-forest-labs/FLUX.2-klein-base-4B$",
        ),
        pytest.param(
            "HunyuanVideo-1.5",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
            r"may be a HunyuanVideo-1.5 or a HunyuanVideo-1.5 image-to-video, .*: .*720p_t2v or .*480p_t2v or .*_i2v",
            marks=pytest.mark.slow,  # builds four modules of 54 blocks
        ),
        (
            "Z-Image Turbo",
            "Tongyi-MAI/Z-Image-Turbo",
            r"may be a Z-Image or a Z-Image Turbo, .*: Tongyi-MAI/Z-Image-Turbo or Tongyi-MAI/Z-Image$",
        ),
        pytest.param(
            "Qwen-Image-Edit",
            "Qwen/Qwen-Image-Edit",
            r"may be a Qwen-Image or a Qwen-Image-Edit or a Qwen-Image-Edit Plus, .*: Qwen/Qwen-Image or .*-Edit$",
            marks=pytest.mark.slow,  # builds modules of 60 blocks
        ),
    ],
)
def test_models_of_equal_shapes_have_to_be_named(model: str, hub_id: str, message: str) -> None:
    with pytest.raises(ComfyTpuError, match=message):
        single_files._detect([header(model, hub_id, ORIGINAL[model])], [])


def test_a_published_part_has_its_configuration_without_a_directory(tmp_path: Path) -> None:
    for model in ("Flux.2 dev", "Flux.2 klein", "HunyuanVideo-1.5 image-to-video", "LTX-Video"):
        family = load_family(model)
        (hub_id, *_) = family.card.published
        configs = {spec.name: single_files._config(spec, family, tmp_path, hub_id, ()) for spec in family.components}
        mean, deviation = family.vae.latent_statistics(configs["vae"])
        assert len(mean) == len(deviation) == family.vae.latent_channels(configs["vae"])
        if model != "LTX-Video":  # as published: transformers' own defaults are others
            text = configs["text_encoder"].get("text_config", configs["text_encoder"])
            rope = text.get("rope_parameters", text)  # its place since transformers 5
            numbers = rope["rope_theta"], text["rms_norm_eps"]
            assert numbers == ((1e9, 1e-5) if model == "Flux.2 dev" else (1e6, 1e-6))


@pytest.mark.parametrize(
    ("files", "layer", "names"),
    [
        (lambda: flux2("dev"), "double_blocks.0.img_attn.qkv", "transformer_blocks.0.attn.to_q.weight"),
        (lambda: hunyuan(comfyui=True), "double_blocks.0.txt_attn.qkv", "transformer_blocks.0.attn.add_q_proj.weight"),
        (ltx, "model.diffusion_model.patchify_proj", "proj_in.weight"),
    ],
    ids=["Flux.2", "HunyuanVideo-1.5", "LTX-Video"],
)
def test_scaled_fp8_is_multiplied_out(files: Callable[[], SingleFiles], layer: str, names: str, tmp_path: Path) -> None:
    scaled = original_names.scaled_fp8(load_file(files().transformers[0]))
    path = save(tmp_path / "scaled.safetensors", scaled)
    read = tensors(open_model(dataclasses.replace(files(), transformers=(path,))), "transformer")
    expected = (scaled[f"{layer}.weight"].float() * scaled[f"{layer}.scale_weight"]).bfloat16()
    assert torch.equal(read[names], expected[: read[names].shape[0]])
    assert not any("scale_weight" in name or "scale_input" in name for name in read)


def test_missing_tensors_are_found_before_weights_are_loaded(tmp_path: Path) -> None:
    path = changed_file(
        tmp_path / "damaged.safetensors",
        ltx().transformers[0],
        lambda content: content.pop("model.diffusion_model.transformer_blocks.1.attn2.q_norm.weight"),
    )
    pipeline = VideoPipeline.open(dataclasses.replace(ltx(), transformers=(path,)), RuntimeConfig(mesh="single"))
    with pytest.raises(ComfyTpuError, match=r"missing from the checkpoint: transformer_blocks.1.attn2.norm_q.weight"):
        pipeline.encode_text("a red circle", pipeline.settings(**{**SIZES, **LTX_SIZES}))


def written(at: Path, content: Tensors) -> Path:
    return save(at / "given.safetensors", content)


def cut(at: Path, source: Path) -> Path:
    path = at / "cut.safetensors"
    path.write_bytes(source.read_bytes()[:-100])
    return path


def lora() -> Tensors:
    return {f"diffusion_model.double_blocks.0.img_attn.qkv.lora_{part}.weight": torch.zeros(4, 4) for part in "AB"}


def four_bits() -> Tensors:
    """As in ComfyUI's nvfp4 files: two values in a byte, and a scale for sixteen."""
    content = load_file(flux2("dev").transformers[0])
    rows, columns = content["img_in.weight"].shape
    packed = {
        "img_in.weight": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        "img_in.weight_scale": torch.zeros(rows, columns // 16).to(torch.float8_e4m3fn),
        "img_in.weight_scale_2": torch.ones(()),
    }
    return content | packed


def step_distilled() -> Tensors:
    return load_file(hunyuan().transformers[0]) | {"time_r_in.mlp.0.weight": torch.zeros(4, 4)}


def later_vae() -> Tensors:
    return original_names.ltx_vae(weights(small_ltx.directory(conditioned=True), "vae"), "0.9.1")


def flux1_vae() -> Tensors:
    return original_names.ldm_vae(weights(small_flux.directory("dev"), "vae"), 4)


REFUSED: dict[str, tuple[Callable[[], SingleFiles], Callable[[Path], dict[str, Any]], str]] = {
    "the transformer of Flux.2 as that of Flux.1": (
        lambda: dataclasses.replace(flux2("dev"), base=str(bare(small_flux.directory("dev")))),
        lambda at: {"text_encoders": flux1_text(at), "vae": written(at, flux1_vae())},
        r"flux2.safetensors holds no Flux.1 dev transformer: it has .*, expected single_transformer_blocks",
    ),
    "the transformer of HunyuanVideo as that of Flux.2": (
        lambda: flux2("dev"),
        lambda at: {"transformers": hunyuan(comfyui=True).transformers},
        r"hunyuan.safetensors holds no Flux.2 dev transformer: .*; choose the file of the Flux.2 dev transformer",
    ),
    "the VAE of Flux.1": (
        lambda: flux2("dev"),
        lambda at: {"vae": written(at, flux1_vae())},
        r"given.safetensors holds no Flux.2 dev vae: .* with bn.running_mean; choose the file",
    ),
    "the VAE of Flux.2": (
        hunyuan,
        lambda at: {"vae": flux2("dev").vae},
        r"flux2-vae.safetensors holds no HunyuanVideo-1.5 vae: .*expected decoder.mid_block.attentions.0.norm.gamma or",
    ),
    "klein's text encoder": (
        lambda: flux2("dev"),
        lambda at: {"text_encoders": flux2("klein").text_encoders},
        r"Flux.2 dev needs a text encoder file with layers.0.self_attn.q_proj.weight without .*; text.safetensors is",
    ),
    "one text encoder of two": (
        hunyuan,
        lambda at: {"text_encoders": hunyuan().text_encoders[:1]},
        r"HunyuanVideo-1.5 needs a text encoder file with layers.0.self_attn.q_proj.bias; .*; give one for each",
    ),
    "no image encoder": (
        lambda: hunyuan(image=True),
        lambda at: {"image_encoder": None},
        r"HunyuanVideo-1.5 image-to-video needs an image encoder",
    ),
    "CLIP vision": (
        lambda: hunyuan(image=True),
        lambda at: {
            "image_encoder": changed_file(
                at / "clip.safetensors",
                hunyuan(image=True).image_encoder or at,
                lambda content: content.update({"vision_model.pre_layrnorm.weight": torch.zeros(4)}),
            )
        },
        r"clip.safetensors holds no HunyuanVideo-1.5 image-to-video image encoder: .* without pre_layrnorm.weight",
    ),
    "a LoRA": (
        lambda: flux2("dev"),
        lambda at: {"transformers": (written(at, lora()),)},
        r"given.safetensors is a LoRA, not a part of a model; give it as a LoRA, and here the model's file",
    ),
    "four bits": (
        lambda: flux2("dev"),
        lambda at: {"transformers": (written(at, four_bits()),)},
        r"given.safetensors is quantized in a way that is not read here \(img_in.weight_scale\); use .*bf16, fp16 or",
    ),
    "GGUF": (
        ltx,
        lambda at: {"transformers": (shutil.copy(ltx().vae, at / "ltx.gguf"),)},
        r"ltx.gguf is a GGUF file.*use the model's safetensors file",
    ),
    "a cut file": (
        ltx,
        lambda at: {"vae": cut(at, ltx().vae)},
        r"cut.safetensors cannot be read as safetensors .* truncated, damaged",
    ),
    "distilled with MeanFlow": (
        hunyuan,
        lambda at: {"transformers": (written(at, step_distilled()),)},
        r"the transformer was distilled with MeanFlow \(time_r_in\), which wants two timesteps; use a model without",
    ),
    "the VAE of a later LTX-Video": (
        ltx,
        lambda at: {"vae": written(at, later_vae())},
        r"the VAE's file is that of LTX-Video 0.9.1 or later, its configuration that of 0.9.0; choose the model",
    ),
    "an unfinished block": (
        lambda: flux2("dev"),
        lambda at: {
            "transformers": (
                changed_file(
                    at / "odd.safetensors",
                    flux2("dev").transformers[0],
                    lambda content: content.update({"double_blocks.0.extra.weight": torch.zeros(4)}),
                ),
            )
        },
        r"odd.safetensors is not a whole Flux.2 dev transformer: its names cannot be converted .*; download it again",
    ),
}


def flux1_text(at: Path) -> tuple[Path, ...]:
    directory = small_flux.directory("dev")
    clip = {f"text_model.{name}": each for name, each in weights(directory, "text_encoder").items()}
    return save(at / "clip.safetensors", clip), save(at / "t5.safetensors", weights(directory, "text_encoder_2"))


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    files, change, message = REFUSED[case]
    changed = dataclasses.replace(files(), **change(tmp_path))
    with pytest.raises(ComfyTpuError) as error:
        open_model(changed)
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_the_schedule_of_the_base_model_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    shutil.copytree(bare(small_ltx.directory()), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_shift": 3.0}))
    changed = open_model(dataclasses.replace(ltx(), base=str(tmp_path)))
    assert changed.fingerprint != open_model(ltx()).fingerprint
    path.write_text(json.dumps({"_class_name": "ShinyScheduler"}))
    with pytest.raises(UnsupportedError, match="has _class_name='ShinyScheduler', expected a scheduler that diffusers"):
        open_model(dataclasses.replace(ltx(), base=str(tmp_path)))
