"""Which published model a file or directory is a version of, and the defaults that it gets for it."""

import pytest

from comfy_tpu.families.registry import find_published, model_cards
from comfy_tpu.families.settings import make_settings
from comfy_tpu.families.variants import find_exact, find_named, find_similar

WAN_IMAGE = ("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers")
HUNYUAN = tuple(f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{size}_{task}" for size in ("720p", "480p") for task in ("t2v", "i2v"))  # fmt: skip  # noqa: E501
KLEIN = ("black-forest-labs/FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-base-4B")
QWEN = ("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512", *(f"Qwen/Qwen-Image-Edit{end}" for end in ("", "-2509", "-2511")))
Z_IMAGE = ("Tongyi-MAI/Z-Image-Turbo", "Tongyi-MAI/Z-Image")


@pytest.mark.parametrize(
    ("file", "hub_ids", "end"),
    [  # as Comfy-Org's, Kijai's and city96's repositories have them
        ("wan2.1_i2v_480p_14B_fp8_e4m3fn", WAN_IMAGE, "480P-Diffusers"),
        ("Wan2_1-I2V-14B-720P_fp8_e4m3fn", WAN_IMAGE, "720P-Diffusers"),
        ("hunyuanvideo1.5_480p_i2v_cfg_distilled_fp16", HUNYUAN, "480p_i2v"),
        ("hunyuanvideo1.5_720p_t2v_fp16", HUNYUAN, "720p_t2v"),
        ("flux-2-klein-4b-fp8", KLEIN, "klein-4B"),
        ("flux-2-klein-base-4b-fp8", KLEIN, "klein-base-4B"),
        ("qwen_image_fp8_e4m3fn", QWEN, "Qwen-Image"),
        ("qwen_image_2512_fp8_e4m3fn", QWEN, "2512"),
        ("qwen_image_edit_fp8_e4m3fn", QWEN, "Edit"),
        ("qwen_image_edit_2511_bf16", QWEN, "2511"),
        ("z_image_turbo_bf16", Z_IMAGE, "Turbo"),
        ("z_image_bf16", Z_IMAGE, "Z-Image"),
    ],
)
def test_a_file_s_name_tells_between_models_of_equal_shapes(file, hub_ids, end):
    assert find_named([file], hub_ids).endswith(end)


@pytest.mark.parametrize("file", ["my_finetune", "wan_i2v_14B", "480p_and_720p", ""])
def test_a_name_that_tells_nothing_chooses_nothing(file):
    assert find_named([file], WAN_IMAGE) == ""


def published(hub_id):
    return find_published(hub_id)[1]


def test_a_directory_is_a_published_model_by_its_name_alone():
    card = published(WAN_IMAGE[0])
    assert find_exact(card, ["/models/wan2.1-i2v-14b-480p-diffusers/"]) == WAN_IMAGE[1]
    assert find_exact(card, ["/models/Wan2.1-I2V-14B-480P-Diffusers-tuned"]) == ""


@pytest.mark.parametrize(
    ("hub_id", "names", "shift"),
    [
        (WAN_IMAGE[1], ["tuned"], 3.0),
        (WAN_IMAGE[0], ["tuned"], 5.0),
        (WAN_IMAGE[1], ["my-480p"], 5.0),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", ["tuned"], None),
        (HUNYUAN[2], ["tuned"], None),
    ],
)
def test_a_tuned_directory_has_the_defaults_of_what_it_was_made_from(hub_id, names, shift):
    card = published(hub_id)
    config = {
        name: list(value) if isinstance(value, tuple) else value for name, value in card.published[hub_id].items()
    }
    assert find_similar(card, names, config, shift) == hub_id


def test_another_transformer_is_similar_to_none():
    card = published(WAN_IMAGE[0])
    assert find_similar(card, ["tuned"], {**card.published[WAN_IMAGE[0]], "num_layers": 41}, None) == ""


@pytest.mark.parametrize("card", model_cards(), ids=lambda card: card.name)
def test_empty_fields_are_the_model_s_own(card):
    for hub_id in card.published:
        own = card.defaults_of(hub_id)
        empty = {"negative_prompt": "", "scheduler": "", "height": None, "num_inference_steps": None}
        assert make_settings(own, empty, card.limits) == make_settings(own, {}, card.limits)
        assert make_settings(own, {"negative_prompt": " "}, card.limits).negative_prompt == " "
