import dataclasses
import errno
import json
import os
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import comfy_tpu
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError
from comfy_tpu.families.wan.card import WAN21
from comfy_tpu.pipeline import artifacts
from comfy_tpu.pipeline.embeddings import PromptEmbeddings

MODEL = types.SimpleNamespace(model_name="demo", model_fingerprint="ab12", dtype_name="float32")
OTHER = types.SimpleNamespace(model_name="owner/wan", model_fingerprint="cd34", dtype_name="float32")
SETTINGS = GenerationSettings(guidance_scale=4.1, seed=2**63, negative_prompt="nicht rot, 不", num_videos=2)


def embeddings(dtype=torch.bfloat16, negative=True):
    # Every bit pattern of bf16 that is a number, denormals and negative zero among them.
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).to(dtype)
    values = values[torch.isfinite(values)].reshape(1, 4, -1)
    return PromptEmbeddings("ein Würfel 红", {"text": values}, {"text": -values} if negative else None, cut="der Rest")


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_text_survives_bit_for_bit(dtype, negative, tmp_path):
    path, saved = tmp_path / "text.safetensors", embeddings(dtype, negative)
    artifacts.save_text(path, saved, SETTINGS, MODEL)
    found, header = artifacts.load_text(path, MODEL)
    assert (found.prompt, found.cut) == (saved.prompt, saved.cut)
    assert torch.equal(bits(found.positive["text"]), bits(saved.positive["text"]))
    assert (found.negative is None) == (not negative)
    if negative:
        assert torch.equal(bits(found.negative["text"]), bits(saved.negative["text"]))
    assert header == artifacts.Header("text", saved.prompt, saved.cut, SETTINGS, "demo", "ab12")
    assert [file.name for file in tmp_path.iterdir()] == ["text.safetensors"]


def test_latents_survive_bit_for_bit(tmp_path):
    path = tmp_path / "new" / "latents.safetensors"
    latents = torch.randn(2, 4, 3, 5, 7).transpose(3, 4)  # not contiguous
    artifacts.save_latents(path, latents, "p", SETTINGS, MODEL, cut="c")
    found, header = artifacts.load_latents(path, MODEL)
    assert torch.equal(bits(found), bits(latents))
    assert (header.prompt, header.cut, header.settings) == ("p", "c", SETTINGS)


@pytest.mark.parametrize(
    ("loras", "text"),
    [
        ("{", "Expecting property name"),
        ('{"name": "x"}', "loras are no list of objects"),
        ("[1]", "loras are no list of objects"),
        ("[" * 100_000, "nested more than 64 levels deep"),
    ],
)
def test_broken_notes_of_loras_are_found_with_the_header(loras, text, tmp_path):
    path = tmp_path / "x.safetensors"
    artifacts.save_latents(path, torch.ones(1, 1, 1, 1, 4), "p", SETTINGS, MODEL, loras=loras)
    with pytest.raises(CheckpointError, match=rf"is not as comfy-tpu writes it \(.*{text}"):
        artifacts.read_header(path, "latents")


def test_names_that_are_not_utf8_can_be_noted(tmp_path):
    """As Python has them of a directory with such a name. No file takes half a character."""
    named = types.SimpleNamespace(model_name="caf\udce9", model_fingerprint="ab12", dtype_name="float32")
    path = tmp_path / "x.safetensors"
    artifacts.save_latents(path, torch.ones(1, 1, 1, 1, 4), "p", SETTINGS, named, loras='[{"name": "\udcff.st"}]')
    header = artifacts.read_header(path, "latents")
    assert (header.model_name, header.loras) == ("caf?", '[{"name": "?.st"}]')


def test_loaded_tensors_do_not_hang_on_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    artifacts.save_latents(path, torch.ones(1, 1, 1, 1, 4), "p", SETTINGS, MODEL)
    found, _ = artifacts.load_latents(path, MODEL)
    with path.open("r+b") as file:
        file.seek(-16, 2)
        file.write(b"\0" * 16)
    assert found.sum() == 4


def test_metadata_say_everything(tmp_path):
    artifacts.save_text(tmp_path / "x.safetensors", embeddings(), SETTINGS, MODEL)
    metadata = artifacts.read_metadata(tmp_path / "x.safetensors", "text")
    assert json.loads(metadata.pop("settings")) == dataclasses.asdict(SETTINGS)
    assert metadata == {
        "artifact": "text",
        "format": "2",
        "comfy_tpu": comfy_tpu.__version__,
        "model": "demo",
        "model_fingerprint": "ab12",
        "dtype": "float32",
        "prompt": "ein Würfel 红",
        "cut": "der Rest",
        "seed": str(2**63),
    }


def rewritten(path, tensors=None, **changes):
    metadata = {**artifacts.read_metadata(path, "text"), **changes}
    save_file(
        tensors or {"positive.text": torch.zeros(1, 2, 3)}, path, {k: v for k, v in metadata.items() if v is not None}
    )


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


settings_of_a_later_version = json.dumps({**dataclasses.asdict(SETTINGS), "sparkle": 1})

REFUSED = {
    "missing": (Path.unlink, InvalidValueError, "does not exist; make it with `comfy-tpu encode PROMPT -o "),
    "truncated": (truncate, CheckpointError, "truncated, damaged .* make it again with `comfy-tpu encode`"),
    "text file": (lambda path: path.write_text("hello"), CheckpointError, "cannot be read as safetensors"),
    "weights": (
        lambda path: save_file({"w": torch.zeros(1)}, path),
        InvalidValueError,
        "no artifact of comfy-tpu; expected what `comfy-tpu encode` makes",
    ),
    "latents": (
        lambda path: artifacts.save_latents(path, torch.zeros(1, 1, 1, 1, 1), "p", SETTINGS, MODEL),
        InvalidValueError,
        "holds latents, made by `comfy-tpu denoise`; expected text, made by `comfy-tpu encode`",
    ),
    "unknown stage": (lambda path: rewritten(path, artifact="depth"), InvalidValueError, "holds depth; expected text"),
    "newer format": (
        lambda path: rewritten(path, format="3", comfy_tpu="9.9"),
        InvalidValueError,
        "has format 3, written by comfy-tpu 9.9; this is .*, which reads format 2: use one version for all stages",
    ),
    "newer settings": (
        lambda path: rewritten(path, settings=settings_of_a_later_version),
        CheckpointError,
        "settings differ in sparkle",
    ),
    "settings that are none": (lambda path: rewritten(path, settings="3"), CheckpointError, "is not as comfy-tpu wri"),
    "no prompt": (
        lambda path: rewritten(path, prompt=None),
        CheckpointError,
        "'prompt'.*make it again with `comfy-tpu",
    ),
    "other tensors": (lambda path: rewritten(path, {"x": torch.zeros(1)}), CheckpointError, r"x has shape \[1\]"),
    "no tensor": (
        lambda path: rewritten(path, {"negative.text": torch.zeros(1, 2, 3)}),
        CheckpointError,
        "positive is missing",
    ),
    "directory": (
        lambda path: (path.unlink(), path.mkdir()),
        InvalidValueError,
        "x.safetensors is a directory; give the file that `comfy-tpu encode` made",
    ),
    "flat tensor": (
        lambda path: rewritten(path, {"positive": torch.zeros(6)}),
        CheckpointError,
        r"positive has shape \[6\]",
    ),
}


@pytest.mark.parametrize(("change", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(change, error, text, tmp_path):
    path = tmp_path / "x.safetensors"
    artifacts.save_text(path, embeddings(), SETTINGS, MODEL)
    change(path)
    with pytest.raises(error, match=text):
        artifacts.load_text(path, MODEL)


def test_a_named_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "x.safetensors"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # or the library would wait for one, and could not be interrupted
    try:
        with pytest.raises(InvalidValueError, match="x.safetensors is not a file; give the one that `comfy-tpu encode"):
            artifacts.read_metadata(path, "text")
    finally:
        os.close(writer)


def test_other_models_artifact(tmp_path):
    path = tmp_path / "x.safetensors"
    artifacts.save_latents(path, torch.zeros(1, 1, 1, 1, 1), "p", SETTINGS, MODEL)
    with pytest.raises(InvalidValueError) as refused:
        artifacts.load_latents(path, OTHER)
    assert str(refused.value) == (
        f"{path} was made with model demo (ab12), this is owner/wan (cd34); run `comfy-tpu denoise` again with "
        "--model owner/wan, or go on with --model demo"
    )


def test_the_same_model_with_other_files(tmp_path):
    path = tmp_path / "x.safetensors"
    artifacts.save_latents(path, torch.zeros(1, 1, 1, 1, 1), "p", SETTINGS, MODEL)
    changed = types.SimpleNamespace(model_name="demo", model_fingerprint="cd34", dtype_name="float32")
    with pytest.raises(InvalidValueError) as refused:
        artifacts.load_latents(path, changed)
    assert str(refused.value) == (
        f"{path} was made with model demo (ab12), whose files have changed since (cd34); run `comfy-tpu denoise` "
        "again, or give the directory of the earlier files with --model"
    )


def test_guidance_needs_a_negative_prompt():
    without = embeddings(negative=False)
    with pytest.raises(InvalidValueError, match=r"^guidance_scale=4.1 needs the negative prompt, and t .*scale 4.1$"):
        artifacts.check_guidance(Path("t"), without, SETTINGS, WAN21)
    artifacts.check_guidance(Path("t"), without, dataclasses.replace(SETTINGS, guidance_scale=1.0), WAN21)
    artifacts.check_guidance(Path("t"), without, SETTINGS, dataclasses.replace(WAN21, guidance="embedded"))
    artifacts.check_guidance(Path("t"), embeddings(), SETTINGS, WAN21)
    from_zero = dataclasses.replace(WAN21, guidance_off=0.0)
    artifacts.check_guidance(Path("t"), without, dataclasses.replace(SETTINGS, guidance_scale=0.0), from_zero)
    with pytest.raises(InvalidValueError, match=r"^guidance_scale=1.0 needs the negative prompt"):
        artifacts.check_guidance(Path("t"), without, dataclasses.replace(SETTINGS, guidance_scale=1.0), from_zero)


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_inference_steps": 3}, {"negative_prompt": ""}], ids=repr)
def test_same_means_prompt_model_and_settings(change):
    mine = artifacts.describe("p", SETTINGS, MODEL)
    assert artifacts.is_same({**mine, "comfy_tpu": "other"}, mine)
    assert not artifacts.is_same(artifacts.describe("p", dataclasses.replace(SETTINGS, **change), MODEL), mine)
    assert not artifacts.is_same(artifacts.describe("q", SETTINGS, MODEL), mine)
    assert not artifacts.is_same(artifacts.describe("p", SETTINGS, OTHER), mine)
    assert not artifacts.is_same(artifacts.describe("p", SETTINGS, MODEL, loras="[a LoRA]"), mine)
    assert not artifacts.is_same(artifacts.describe("p", SETTINGS, MODEL, images_fingerprint="ab12"), mine)
    assert not artifacts.is_same({}, mine)


def test_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    artifacts.save_text(path, embeddings(), SETTINGS, MODEL)
    before = path.read_bytes()

    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ComfyTpuError, match="could not be written: No space left on device"):
        artifacts.save_text(path, embeddings(torch.float32), SETTINGS, MODEL)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]
