"""The model that is shipped: its files, its tokenizer, and a fixed prompt that must come out right."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from comfy_tpu.pipeline.model_files import ModelFiles
from tools.demo_model.captions import Attributes, plain_caption
from tools.demo_model.evaluate import generate
from tools.demo_model.model import FLOAT32_PARTS, SHARED_PARTS, load, load_image_model, new_tokenizer, save_image_model
from tools.demo_model.score import observe

DEMO = Path(__file__).parents[2] / "src" / "comfy_tpu" / "assets" / "demo"
PARTS = {"lora", "scheduler", "text_encoder", "tokenizer", "transformer", "vae"}
IMAGE_PARTS = {"image_to_video", "image_encoder", "image_processor"}


def test_files_are_small_and_hold_no_code():
    files = [file for file in DEMO.rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} - {"demo"} == PARTS | IMAGE_PARTS
    assert {file.suffix for file in files} == {".json", ".safetensors", ".md"}
    assert max(file.stat().st_size for file in files) <= 16_000_000
    assert sum(file.stat().st_size for file in files) <= 30_000_000
    assert not any("_name_or_path" in file.read_text() for file in files if file.suffix == ".json")


def test_both_models_share_what_they_can():
    """By name: wheel builders follow links and ship one of two equal folders."""
    assert not [path for path in DEMO.rglob("*") if path.is_symlink()]
    files = ModelFiles.open("demo-image")
    assert files.shared_parts == set(SHARED_PARTS)
    assert {files.path(name) for name in SHARED_PARTS} == {DEMO / name for name in SHARED_PARTS}
    assert files.path("transformer") == DEMO / "image_to_video" / "transformer"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_saved_image_model_lists_what_it_shares(tmp_path):
    shutil.copytree(DEMO, tmp_path / "base", ignore=shutil.ignore_patterns("image_to_video"))
    saved = tmp_path / "base" / "image_to_video"
    pipeline = load_image_model(DEMO / "image_to_video")
    save_image_model(saved, tmp_path / "base", pipeline.image_encoder, pipeline.transformer)
    shipped = DEMO / "image_to_video"
    assert (saved / "shared_parts.json").read_text() == (shipped / "shared_parts.json").read_text()
    assert {path.name for path in saved.iterdir()} == {path.name for path in shipped.iterdir()}
    assert ModelFiles.open(saved).defaults == ModelFiles.open("demo-image").defaults


@pytest.mark.parametrize("model", [DEMO, DEMO / "image_to_video"], ids=["demo", "demo-image"])
def test_precision_is_wans(model):
    with safe_open(model / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no dict, and cannot be iterated over
            wide = any(part in name.split(".") for part in FLOAT32_PARTS)
            assert weights.get_slice(name).get_dtype() == ("F32" if wide else "BF16"), name


def test_the_saved_tokenizer_is_the_grammars():
    saved = json.loads((DEMO / "tokenizer" / "tokenizer.json").read_text())
    assert saved["model"]["vocab"] == new_tokenizer().get_vocab()
    tokens = new_tokenizer()(["A RED circle, moving sideways.", ""]).input_ids
    assert new_tokenizer().batch_decode(tokens) == ["a red circle , moving <unk> . </s>", "</s>"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_held_out_prompt_comes_out_right():
    wanted = Attributes("red", "circle", "left", "black")
    pipeline = load(DEMO)
    video = generate(pipeline, [plain_caption(wanted)], steps=20, guidance=3.0, seed=1, batch=1)
    assert video.shape == (1, 17, 64, 64, 3)
    assert observe(video[0]).agrees(wanted) == dict.fromkeys(("colour", "shape", "motion", "background"), True)
    assert torch.get_default_dtype() == torch.float32
