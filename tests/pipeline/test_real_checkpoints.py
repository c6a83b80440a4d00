"""Published checkpoints, by the lists of their tensors: each tensor has a place, and each place is filled."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from comfy_tpu.bench.models import find_bench_model
from comfy_tpu.bridge import build_skeleton, weight_shapes
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.compiler.weights import WeightSource
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.registry import find_published, load_family
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline import single_files
from comfy_tpu.pipeline.lora_keys import make_targets
from tests.pipeline import original_names
from tests.real_lists import (
    PUBLISHED,
    ListSource,
    Tensors,
    hash_list,
    make_list,
    needs_published,
    read_index,
    read_list,
    repeat_layers,
)

pytestmark = needs_published

FLUX1, FLUX2, KLEIN4, KLEIN9 = (
    f"black-forest-labs/FLUX.{name}" for name in ("1-dev", "2-dev", "2-klein-4B", "2-klein-9B")
)
WAN_T2V, WAN_SMALL, WAN_I2V, WAN_FLF2V, WAN22_I2V, WAN22_5B, WAN_ANIMATE = (
    f"Wan-AI/Wan2.{name}"
    for name in (
        "1-T2V-14B-Diffusers",
        "1-T2V-1.3B-Diffusers",
        "1-I2V-14B-720P-Diffusers",
        "1-FLF2V-14B-720P-diffusers",
        "2-I2V-A14B-Diffusers",
        "2-TI2V-5B-Diffusers",
        "2-Animate-14B-Diffusers",
    )
)
VACE, VACE_SMALL, VACE_FUN = (
    "Wan-AI/Wan2.1-VACE-14B-diffusers",
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers",
    "linoyts/Wan2.2-VACE-Fun-14B-diffusers",
)
QWEN, QWEN_EDIT, QWEN_PLUS = (f"Qwen/Qwen-Image{name}" for name in ("", "-Edit", "-Edit-2511"))
Z_IMAGE, HUNYUAN = "Tongyi-MAI/Z-Image-Turbo", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v"

DIRECTORIES = [
    ("FLUX.1-dev_transformer", FLUX1, "transformer"),
    ("FLUX.1_CLIP", FLUX1, "text_encoder"),
    ("FLUX.1_T5", FLUX1, "text_encoder_2"),
    ("FLUX.2-dev_transformer", FLUX2, "transformer"),
    ("FLUX.2-dev_text_encoder_hub_names", FLUX2, "text_encoder"),
    ("FLUX.2_vae", FLUX2, "vae"),
    ("FLUX.2-klein-4B_transformer", KLEIN4, "transformer"),
    ("FLUX.2-klein-9B_transformer", KLEIN9, "transformer"),
    ("klein-9B_text_encoder_Qwen3-8B", KLEIN9, "text_encoder"),
    ("Qwen-Image_transformer", QWEN, "transformer"),
    ("Qwen-Image_text_encoder", QWEN, "text_encoder"),
    ("Qwen-Image_text_encoder", QWEN_EDIT, "text_encoder"),
    ("Qwen-Image_vae", QWEN, "vae"),
    ("Z-Image-Turbo_transformer", Z_IMAGE, "transformer"),
    ("Z-Image-Turbo_vae", Z_IMAGE, "vae"),
    ("Z-Image_text_encoder_Qwen3-4B", Z_IMAGE, "text_encoder"),
    ("Z-Image_text_encoder_Qwen3-4B", KLEIN4, "text_encoder"),
]
"""List, hub id and component of model directories."""

TRANSFORMERS = {
    "verified_native_flux1-dev": FLUX1,
    "verified_native_Wan2.1-T2V-14B": WAN_T2V,
    "verified_native_Wan2.1-T2V-1.3B": WAN_SMALL,
    "verified_native_Wan2.1-I2V-14B-720P": WAN_I2V,
    "verified_native_Wan2.1-FLF2V-14B-720P": WAN_FLF2V,
    "verified_native_Wan2.1-VACE-14B": VACE,
    "verified_native_Wan2.1-VACE-1.3B": VACE_SMALL,
    "verified_native_Wan2.2-I2V-A14B": WAN22_I2V,
    "verified_native_Wan2.2-TI2V-5B": WAN22_5B,
    "wan2.2_fun_vace_14B_fp8_scaled": VACE_FUN,
    "invokeai_flux2_transformer_bfl_keys": KLEIN9,
    "invokeai_z_image_transformer_comfyui_keys": Z_IMAGE,
    "verified_FLUX.1-dev_transformer": FLUX1,
    "verified_FLUX.2-dev_transformer": FLUX2,
    "verified_Qwen-Image_transformer": QWEN,
}
"""The lists of single files, and the hub id of the published model of their shapes."""

AMBIGUOUS = {
    "invokeai_flux2_transformer_bfl_keys",
    "invokeai_z_image_transformer_comfyui_keys",
    "verified_Qwen-Image_transformer",
}
"""Lists of models with the same shapes under several names."""

PARTS = [
    ("comfyui_tpu_flux_vae_params", FLUX1, "vae"),
    ("comfyui_tpu_flux_vae_params", Z_IMAGE, "vae"),
    ("comfyui_tpu_vae_params", WAN_T2V, "vae"),
    ("comfyui_tpu_vae_params", QWEN, "vae"),
    ("invokeai_flux2_vae_bfl_keys", KLEIN9, "vae"),
    ("umt5_xxl_fp8_e4m3fn_scaled", WAN_T2V, "text_encoder"),
    ("verified_native_models_t5_umt5-xxl-enc-bf16", WAN_T2V, "text_encoder"),
    ("qwen_2.5_vl_7b_fp8_scaled", QWEN, "text_encoder"),
    ("qwen_2.5_vl_7b_fp8_scaled", QWEN_EDIT, "text_encoder"),
    ("qwen_2.5_vl_7b_fp8_scaled", QWEN_PLUS, "text_encoder"),
    ("qwen_2.5_vl_7b_fp8_scaled", HUNYUAN, "text_encoder"),
    ("invokeai_qwen_vl_encoder_comfyui_keys", QWEN_PLUS, "text_encoder"),
    ("verified_FLUX.1_CLIP", FLUX1, "text_encoder"),
    ("verified_FLUX.1_T5", FLUX1, "text_encoder_2"),
    ("verified_Z-Image_text_encoder_Qwen3-4B", Z_IMAGE, "text_encoder"),
    ("verified_klein-9B_text_encoder_Qwen3-8B", KLEIN9, "text_encoder"),
    ("verified_FLUX.2-dev_text_encoder_hub_names", FLUX2, "text_encoder"),
]
"""List, hub id and component of single files beside the transformer."""

NATIVE_ALONE = {
    "verified_native_LTX-2_transformer_prefixed": "Lightricks/LTX-2",
    "verified_native_LTX-2.3-Diffusers_transformer_prefixed": "diffusers/LTX-2.3-Diffusers",
}
"""Lists of single files that are not read, whose names LoRAs have."""

FOREIGN = {
    "comfyui_tpu_krea2_params": "Krea 2",
    "verified_Krea-2_transformer": "Krea 2",
    "comfyui_tpu_pid_params": "PiD",
    "comfyui_tpu_gemma_params": "Gemma 2",
    "comfyui_tpu_qwen3vl_params": "Qwen3-VL",
    "invokeai_anima_comfyui_keys": "Anima",
}
"""Lists of models of other families."""

LAYERS = {
    "invokeai_flux2_transformer_bfl_keys": {"double_blocks": 8, "single_blocks": 24},
    "invokeai_z_image_transformer_comfyui_keys": {"layers": 30, "context_refiner": 2, "noise_refiner": 2},
    "invokeai_qwen_vl_encoder_comfyui_keys": {"layers": 28, "blocks": 32},
}
"""Lists with the first layer of each kind, and how many there are."""

INDEXES = [
    ("Lightricks__LTX-Video-0.9.7-diffusers/text_encoder/model", "Lightricks/LTX-Video", "text_encoder"),
    ("Qwen__Qwen-Image-Edit/text_encoder/model", QWEN_EDIT, "text_encoder"),
    ("Qwen__Qwen-Image-Edit/transformer/diffusion_pytorch_model", QWEN_EDIT, "transformer"),
    ("Qwen__Qwen-Image/text_encoder/model", QWEN, "text_encoder"),
    ("Qwen__Qwen-Image/transformer/diffusion_pytorch_model", QWEN, "transformer"),
    ("Tongyi-MAI__Z-Image-Turbo/text_encoder/model", Z_IMAGE, "text_encoder"),
    ("Tongyi-MAI__Z-Image-Turbo/transformer/diffusion_pytorch_model", Z_IMAGE, "transformer"),
    ("Wan-AI__Wan2.1-T2V-1.3B-Diffusers/text_encoder/model", WAN_SMALL, "text_encoder"),
    ("Wan-AI__Wan2.1-T2V-1.3B-Diffusers/transformer/diffusion_pytorch_model", WAN_SMALL, "transformer"),
    ("black-forest-labs__FLUX.1-dev/text_encoder_2/model", FLUX1, "text_encoder_2"),
    ("black-forest-labs__FLUX.1-dev/transformer/diffusion_pytorch_model", FLUX1, "transformer"),
    (
        "black-forest-labs__FLUX.1-schnell/text_encoder_2/model",
        "black-forest-labs/FLUX.1-schnell",
        "text_encoder_2",
    ),
    (
        "black-forest-labs__FLUX.1-schnell/transformer/diffusion_pytorch_model",
        "black-forest-labs/FLUX.1-schnell",
        "transformer",
    ),
    ("google__gemma-3-12b-it/model", "Lightricks/LTX-2", "text_encoder"),
]
"""Names without shapes: index, hub id and component."""


@functools.cache
def tensors(name: str) -> Tensors:
    return repeat_layers(read_list(f"keys/{name}"), LAYERS.get(name, {" ": 1}))


def family_of(hub_id: str) -> ModelFamily:
    published = find_published(hub_id)
    assert published is not None
    return load_family(published[1].name)


@functools.cache
def config_of(hub_id: str, part: str) -> dict[str, Any]:
    configs = find_bench_model(hub_id).configs
    return {**single_files._class_defaults(spec_of(hub_id, part)), **configs[part]}


def spec_of(hub_id: str, part: str) -> ComponentSpec:
    return next(spec for spec in family_of(hub_id).components if spec.name == part)


@functools.cache
def component(hub_id: str, part: str) -> Component:
    placement = make_placement("single", platform="cpu")
    return Component(spec_of(hub_id, part), config_of(hub_id, part), placement, dtype=torch.bfloat16)


def open_part(hub_id: str, part: str, name: str) -> WeightSource:
    return family_of(hub_id).single_files[part].open(ListSource(tensors(name)), config_of(hub_id, part), part)


def detect(*transformers: ListSource) -> str:
    return single_files._detect(transformers, ["published"])[0]


@pytest.mark.parametrize(("name", "hub_id", "part"), DIRECTORIES)
def test_a_model_directory_fills_the_module(name: str, hub_id: str, part: str) -> None:
    component(hub_id, part).check(ListSource(tensors(f"verified_{name}")))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_single_file_fills_the_transformer(name: str) -> None:
    hub_id = TRANSFORMERS[name]
    component(hub_id, "transformer").check(open_part(hub_id, "transformer", name))


@pytest.mark.parametrize("name", ["verified_native_flux1-dev", "invokeai_z_image_transformer_comfyui_keys"])
def test_comfyuis_prefix_is_taken_off(name: str) -> None:
    hub_id = TRANSFORMERS[name]
    prefixed = make_list({f"model.diffusion_model.{key}": info.shape for key, info in tensors(name).items()})
    part = family_of(hub_id).single_files["transformer"]
    source = part.open(ListSource(prefixed), config_of(hub_id, "transformer"), "transformer")
    component(hub_id, "transformer").check(source)


CHANGES = {
    "lacks layers.3.attention.to_q.weight, lacks ": {"layers.3.attention.qkv.weight": None},
    "also has layers.3.attention.extra.weight": {"layers.3.attention.extra.weight": (8, 8)},
    "has cap_embedder.1.weight in shape (3840, 2048) instead of (3840, 2560)": {"cap_embedder.1.weight": (3840, 2048)},
}


@pytest.mark.parametrize("difference", CHANGES)
def test_what_keeps_a_file_from_being_a_published_one_is_said(difference: str) -> None:
    shapes = {key: info.shape for key, info in tensors("invokeai_z_image_transformer_comfyui_keys").items()}
    for key, shape in CHANGES[difference].items():
        shapes[key] = shape
        if shape is None:
            del shapes[key]
    with pytest.raises(CheckpointError, match=re.escape(f"the closest is {Z_IMAGE}: the file {difference}")) as caught:
        detect(ListSource(make_list(shapes)))
    assert "\n" not in str(caught.value)


@pytest.mark.thorough  # by default: the same models by files made here, in test_single_files.py
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_single_file_is_recognised(name: str) -> None:
    hub_id = TRANSFORMERS[name]
    given = [ListSource(tensors(name))] * len(family_of(hub_id).denoiser.transformers)
    if name in AMBIGUOUS:
        with pytest.raises(InvalidValueError, match=f"have the same shapes; say which: .*{hub_id}"):
            detect(*given)
    else:
        assert detect(*given) == hub_id


@pytest.mark.parametrize(("name", "hub_id", "part"), PARTS)
def test_a_single_file_fills_its_part(name: str, hub_id: str, part: str) -> None:
    component(hub_id, part).check(open_part(hub_id, part, name))


@pytest.mark.parametrize(("index", "hub_id", "part"), INDEXES)
def test_the_names_of_an_index_are_those_of_the_module(index: str, hub_id: str, part: str) -> None:
    found = make_list(dict.fromkeys(read_index(f"{index}.safetensors.index.json"), ()))
    with pytest.raises(CheckpointError) as caught:  # of shapes, which an index does not have
        component(hub_id, part).check(ListSource(found))
    assert "missing from" not in str(caught.value)
    assert "no place for" not in str(caught.value)


@pytest.mark.parametrize("name", [*TRANSFORMERS, *NATIVE_ALONE])
def test_loras_may_name_each_module_as_the_file_does(name: str) -> None:
    hub_id = (TRANSFORMERS | NATIVE_ALONE)[name]
    family = family_of(hub_id)
    model = family.card.name
    targets = make_targets(make_list(single_files.published_shapes(model, hub_id)), family.denoiser.lora_names)
    modules = {re.sub(r"\.(weight|bias|scale_weight)$", "", key) for key in tensors(name)}
    extras = {"scaled_fp8", "norm_final", "img_emb.emb_pos"}
    assert [module for module in modules - extras if not targets.find(module)] == []


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_family_is_named_as_such(name: str) -> None:
    with pytest.raises(CheckpointError, match="is no transformer that is known here: it holds"):
        detect(ListSource(tensors(name)))


def grouped_vae(own: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The VAE of Wan 2.2 5B under its authors' names: its blocks are in groups."""
    inner = {"norm1.": "residual.0.", "conv1.": "residual.2.", "norm2.": "residual.3.", "conv2.": "residual.6."}
    names: dict[str, tuple[int, ...]] = {}
    for name, shape in own.items():
        if match := re.fullmatch(r"(encoder|decoder)\.(down|up)_blocks\.(\d)\.(\w+)\.(?:(\d)\.)?(.+)", name):
            part, kind, group, block, number, rest = match.groups()
            if block == "resnets":
                rest = rest.replace("conv_shortcut.", "shortcut.")
                for theirs, original in inner.items():
                    rest = re.sub(rf"^{theirs}", original, rest)
            else:  # a sampler, behind two or three blocks
                number = "2" if kind == "down" else "3"
            name = f"{part}.{kind}samples.{group}.{kind}samples.{number}.{rest}"
        else:
            (name,) = original_names.wan_vae({name: torch.empty(())}, 2)
        names[name] = shape
    return make_list(names)


def test_the_vae_of_wan_5b_is_that_of_the_published_file() -> None:
    """Its list is known by its hash alone."""
    spec, config = spec_of(WAN22_5B, "vae"), config_of(WAN22_5B, "vae")
    own = weight_shapes(build_skeleton(lambda: spec.build(config)))
    listed = grouped_vae({name: tuple(tensor.shape) for name, tensor in own.items()})
    assert hash_list(listed.values()) == "e1de6c02cdac79f8b739f4d3698cd216", "Wan2.2_VAE.pth, by DiffSynth-Studio"
    part = family_of(WAN22_5B).single_files["vae"]
    component(WAN22_5B, "vae").check(part.open(ListSource(listed), config, "vae"))


def test_every_list_is_tested_and_is_that_of_the_file_that_it_is_said_to_be() -> None:
    known = json.loads((PUBLISHED / "keys" / "diffsynth_hashes.json").read_text())
    tested = {f"verified_{name}" for name, _, _ in DIRECTORIES} | {name for name, _, _ in PARTS}
    tested |= {*TRANSFORMERS, *NATIVE_ALONE, *FOREIGN}
    assert tested == {path.stem for path in (PUBLISHED / "keys").glob("*.json")} - {"diffsynth_hashes"}
    verified = [name for name in tested if name.startswith("verified_")]
    assert [name for name in verified if hash_list(tensors(name).values()) not in known] == []
