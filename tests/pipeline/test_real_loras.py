"""Published LoRAs, by the lists of their tensors: how much of each is merged, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.lora import check_match, describe_misfits
from comfy_tpu.pipeline.lora_keys import LoraFile, LoraMatch
from comfy_tpu.pipeline.lora_report import LoraTargets
from tests.real_lists import PUBLISHED, Tensors, make_list, needs_published, read_list, write_zeros

pytestmark = needs_published

FLUX, SCHNELL, KLEIN = (f"black-forest-labs/FLUX.{name}" for name in ("1-dev", "1-schnell", "2-klein-9B"))
WAN_T2V, WAN_SMALL, WAN_I2V, WAN22_T2V, WAN22_I2V = (
    f"Wan-AI/Wan2.{name}-Diffusers"
    for name in ("1-T2V-14B", "1-T2V-1.3B", "1-I2V-14B-720P", "2-T2V-A14B", "2-I2V-A14B")
)
QWEN, QWEN_EDIT = "Qwen/Qwen-Image", "Qwen/Qwen-Image-Edit-2511"
Z_IMAGE, LTX2, LTX23 = "Tongyi-MAI/Z-Image-Turbo", "Lightricks/LTX-2", "diffusers/LTX-2.3-Diffusers"

WHOLE = [
    ("flux2_klein_9b_lokr_names_only", KLEIN, 64),
    ("flux_lora_transformer_underscored", FLUX, 266),
    ("invokeai_flux_dora_onetrainer_format", FLUX, 266),
    ("invokeai_flux_lokr_bfl_format", FLUX, 6),
    ("invokeai_flux_lora_aitoolkit_format", FLUX, 228),
    ("invokeai_flux_lora_diffusers_base_model_format", FLUX, 381),
    ("invokeai_flux_lora_diffusers_format", FLUX, 494),
    ("invokeai_flux_lora_diffusers_no_proj_mlp_format", FLUX, 342),
    ("invokeai_flux_lora_kohya_format", FLUX, 304),
    ("invokeai_flux_lora_kohya_format", SCHNELL, 304),
    ("invokeai_flux_lora_kohya_with_te1_format", FLUX, 304),
    ("invokeai_flux_lora_xlabs_format", FLUX, 12),
    ("invokeai_qwen_image_lora_diffusers_format", QWEN, 3),
    ("invokeai_qwen_image_lora_kohya_format", QWEN, 8),
    ("ltx2_comfy_all_block_layers", LTX2, 1344),
    ("ltx2_comfy_all_block_layers", LTX23, 1344),
    ("qwen_image_lightning", QWEN, 720),
    ("qwen_image_lightning", QWEN_EDIT, 720),
    ("qwen_image_peft_default", QWEN, 720),
    ("wan21_i2v_14b_lightx2v_rank64", WAN_I2V, 772),
    ("wan22_lightning_t2v_a14b_4steps_kijai", WAN22_T2V, 400),
    ("wan22_t2v_a14b_lightx2v_rank64", WAN22_T2V, 648),
    ("wan22_t2v_a14b_lightx2v_rank64", WAN_T2V, 648),
    ("wan_diffusion_pipe", WAN_T2V, 400),
    ("z_image_ai_toolkit_attention_only", Z_IMAGE, 120),
    ("z_image_musubi_attention_only", Z_IMAGE, 120),
]
"""List, hub id, and the number of the file's modules."""
PLACEHOLDERS = {
    "flux2_klein_9b_lokr_names_only",
    "invokeai_flux_lokr_bfl_format",
    "invokeai_qwen_image_lora_kohya_format",
}
"""Lists of LoKrs whose names are real and whose shapes are not."""
FOREIGN = {
    "invokeai_anima_lora_kohya_format": WAN_T2V,
    "invokeai_anima_lora_kohya_with_te_format": WAN_T2V,
    "invokeai_anima_lora_lokr_format": WAN_T2V,
    "invokeai_anima_lora_peft_format": WAN_T2V,
    "invokeai_krea2_lora_kohya_format": FLUX,
}
"""Lists of other families, and a model whose names are closest."""


@functools.cache
def targets_of(hub_id: str) -> LoraTargets:
    return LoraTargets.find(hub_id)


def match(tmp_path: Path, tensors: Tensors, hub_id: str) -> LoraMatch:
    """What the model merges of the file. Raises where it is refused."""
    place = targets_of(hub_id)
    file = LoraFile.open(write_zeros(tmp_path / "lora.safetensors", tensors))
    matched = file.match(place.targets)
    check_match(file.path, file, matched, place.targets, place.model, place.family.name)
    return matched


def with_shapes(tensors: Tensors, hub_id: str) -> Tensors:
    """The LoKrs with shapes whose products fit the model."""
    place, made = targets_of(hub_id).targets, dict[str, tuple[int, ...]]()
    for name in tensors:
        module, _, part = name.rpartition(".")
        (first, *_) = found = place.find(module)
        outputs = max(rows.stop or place.shapes[first.weight][0] for target in found for rows in target.rows)
        made[name] = {"lokr_w1": (4, 4), "lokr_w2": (outputs // 4, place.shapes[first.weight][1] // 4)}.get(part, ())
    return make_list(made)


@pytest.mark.parametrize(("name", "hub_id", "modules"), WHOLE)
def test_all_of_a_lora_is_merged(name: str, hub_id: str, modules: int, tmp_path: Path) -> None:
    tensors = read_list(f"lora/{name}")
    if name in PLACEHOLDERS:
        tensors = with_shapes(tensors, hub_id)
    matched = match(tmp_path, tensors, hub_id)
    assert (matched.unknown_keys, matched.misfits, matched.known_modules) == ([], {}, modules)
    assert all(key.startswith("lora_te") for key in matched.text_keys)


@pytest.mark.parametrize(
    ("name", "hub_id", "channels"),
    [("wan21_i2v_14b_lightx2v_rank64", WAN_T2V, (36, 16)), ("wan22_t2v_a14b_lightx2v_rank64", WAN22_I2V, (16, 36))],
)
def test_wans_patch_embedding_is_left_out_where_it_is_another(
    name: str, hub_id: str, channels: tuple[int, int], tmp_path: Path
) -> None:
    matched = match(tmp_path, read_list(f"lora/{name}"), hub_id)
    theirs, ours = ((5120, count, 1, 2, 2) for count in channels)
    assert describe_misfits(matched) == [f"patch_embedding.weight {theirs} instead of {ours}"]
    assert "patch_embedding.bias" in matched.factors
    assert all("img" in key for key in matched.unknown_keys)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_lora_of_another_family_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="use a LoRA made for") as caught:
        match(tmp_path, read_list(f"lora/{name}"), FOREIGN[name])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("wan22_t2v_a14b_lightx2v_rank64", WAN_SMALL),
        ("wan_diffusion_pipe", WAN_SMALL),
        ("wan_diffusion_pipe", FLUX),
        ("invokeai_flux_lora_kohya_format", KLEIN),
        ("qwen_image_lightning", FLUX),
        ("z_image_musubi_attention_only", QWEN),
        ("ltx2_comfy_all_block_layers", QWEN),
    ],
)
def test_a_lora_of_another_model_is_refused(name: str, hub_id: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="use a LoRA made for"):
        match(tmp_path, read_list(f"lora/{name}"), hub_id)


def test_a_control_lora_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"is a control LoRA: .* x_embedder.weight \(3072, 128\) instead of"):
        match(tmp_path, read_list("lora/invokeai_flux_control_lora_format"), FLUX)


def test_every_list_is_tested() -> None:
    tested = {name for name, *_ in WHOLE} | {*FOREIGN, "invokeai_flux_control_lora_format"}
    assert tested == {path.stem for path in (PUBLISHED / "lora").glob("*.json")}
