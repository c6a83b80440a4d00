"""TPU Load Pipeline, and what samplers read of a CONDITIONING. Needs no ComfyUI."""

import pytest

from tests.comfy_pack.loading import run_script


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    for name in ("t.safetensors", "e.safetensors", "v.sft"):
        (models / name).touch()
    return run_script("run_pipeline_node.py", models)


def test_the_node_gives_files_or_a_whole_model(outcomes):
    assert outcomes["node"] == {
        "files": True,
        "checked": True,
        "whole": "demo",
        "nothing": "no file is chosen; choose a transformer, text encoder and vae, or a base_model",
        "no vae": "vae is none; choose its file, or none for all of them",
        "valid": True,
        "gguf": "transformer=t.gguf is a GGUF file, which is not read here; use the model's safetensors file",
        "pickle": "text_encoder_2=e.ckpt is not a safetensors file, and may run code when it is opened; use that "
        "version of it",
        "absent": "vae=other.safetensors is not in ComfyUI's models/vae or models/checkpoints; choose one of its files",
    }


def test_a_pipeline_goes_before_model_id(outcomes):
    assert outcomes["pipeline wins"]
    assert outcomes["wrong pipeline"] == "pipeline is a int, expected what TPU Load Pipeline gives"


def test_prompts_that_follow_each_other_are_read(outcomes):
    assert outcomes["conditionings"]["plain"] == []
    assert outcomes["conditionings"]["halves"] == [[0.0, 0.5, 1.0], [0.5, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("combined", "prompt_embeds holds 2 prompts, 2 of them for step 1 of 4, expected one for each step"),
        ("late", "prompt_embeds holds 1 prompts, none of them for step 1 of 4, expected one for each step"),
        ("area", "prompt_embeds comes with area, from Conditioning (Set Area), which is not read here"),
        ("mask", "prompt_embeds comes with mask, from Conditioning (Set Mask), which is not read here"),
        ("strength", "prompt_embeds comes with strength, from Conditioning (Set Area Strength), which is not read"),
        (
            "guidance",
            "prompt_embeds comes with guidance, from a guidance node, which is not read here; set guidance_scale",
        ),
        ("control", "prompt_embeds comes with control, from Apply ControlNet, which is not read here"),
        ("no conditioning", "prompt_embeds is not a CONDITIONING"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_it_is_opened(name, begin, outcomes):
    assert outcomes["conditionings"][name].startswith(begin)


def test_the_node_says_that_the_demo_has_one_size(outcomes):
    assert outcomes["shown"].startswith("demo always draws 64×64\n64×64, 17 frames · step 1/4")
