"""Model directories: found, checked, refused with the reason."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError, UnsupportedError
from comfy_tpu.pipeline import model_files
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, SHARED_PARTS_FILE, ModelFiles
from tests.pipeline import small_pipeline


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_pipeline.directory(), tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop(path: Path, key: str) -> None:
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != key}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("content", [None, "{"])
def test_a_damaged_tokenizer_is_named(directory: Path, content: str | None) -> None:
    for path in (directory / "tokenizer").iterdir():
        path.unlink()
    if content is not None:
        (directory / "tokenizer" / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"has a tokenizer that cannot be read .*download the model again"):
        ModelFiles.open(directory).tokenizer("tokenizer")


def test_a_whole_directory_is_accepted(directory: Path) -> None:
    files = ModelFiles.open(directory)
    assert files.family.name == "Wan 2.1"
    assert len(files.fingerprint) == 16
    assert files.defaults == files.family.card.defaults


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda d: shutil.rmtree(d / "vae"), CheckpointError, "lacks vae; a WanPipeline directory has text_encoder"),
        (lambda d: shutil.rmtree(d / "tokenizer"), CheckpointError, "lacks tokenizer"),
        (
            lambda d: next((d / "vae").glob("*.safetensors")).unlink(),
            CheckpointError,
            "^model=.*: the weights of its vae cannot be used: .* has no .safetensors files",
        ),
        (
            lambda d: truncate(next((d / "transformer").glob("*.safetensors"))),
            CheckpointError,
            "^model=.*: the weights of its transformer cannot be used: .*truncated, damaged",
        ),
        (lambda d: (d / "model_index.json").unlink(), CheckpointError, "model_index.json does not exist"),
        (lambda d: (d / "model_index.json").write_text("{"), CheckpointError, "cannot be read"),
        (lambda d: (d / "model_index.json").write_text("[]"), CheckpointError, "holds a list, expected an object"),
        (
            lambda d: edit(d / "model_index.json", _class_name="StableDiffusionPipeline"),
            UnsupportedError,
            "the model is a StableDiffusionPipeline; supported are Wan 2.1 .WanPipeline.",
        ),
        (
            lambda d: edit(d / "transformer" / "config.json", _class_name="FluxTransformer2DModel"),
            CheckpointError,
            "describes a FluxTransformer2DModel, expected WanTransformer3DModel; this is not a Wan 2.1 transformer",
        ),
        (
            lambda d: drop(d / "vae" / "config.json", "latents_mean"),
            CheckpointError,
            "vae.config.json cannot be used .KeyError: 'latents_mean'.; download the model again",
        ),
    ],
)
def test_a_damaged_directory_is_refused(
    directory: Path, spoil: Callable[[Path], object], error: type[ComfyTpuError], text: str
) -> None:
    spoil(directory)
    with pytest.raises(error, match=text):
        ModelFiles.open(directory)


PARTS = ("vae", "tokenizer", "generation.json")


@pytest.fixture
def sharing(directory: Path) -> Path:
    """A model whose VAE, tokenizer and defaults are in the directory above it."""
    (directory / "generation.json").write_text('{"height": 64}')
    for name in PARTS:
        (directory / name).rename(directory.parent / name)
    (directory / SHARED_PARTS_FILE).write_text(json.dumps({"from_parent": PARTS}))
    return directory


def test_parts_may_be_in_the_directory_above(sharing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ModelFiles.open(sharing)
    assert files.defaults.height == 64
    assert files.tokenizer("tokenizer") is not None
    complete = tmp_path / "complete"
    shutil.copytree(sharing, complete)
    (complete / SHARED_PARTS_FILE).unlink()
    for name in PARTS[:2]:
        shutil.copytree(tmp_path / name, complete / name)
    assert ModelFiles.open(complete).fingerprint == files.fingerprint

    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(sharing)
    monkeypatch.chdir(sharing)
    assert {ModelFiles.open(model).fingerprint for model in (link, ".")} == {files.fingerprint}


def test_a_shared_part_is_never_looked_for_in_two_places(sharing: Path) -> None:
    shutil.move(sharing.parent / "vae", sharing / "vae")
    with pytest.raises(CheckpointError, match="lacks vae; a WanPipeline directory has .*: download the model again"):
        ModelFiles.open(sharing)


@pytest.mark.parametrize(
    "content",
    ["[]", "{", "{}", '{"from_parent": "vae"}', '{"from_parent": [1]}', '{"from_parent": [], "from": "/"}']
    + [json.dumps({"from_parent": [name]}) for name in ("../vae", "/etc", "a/b", "..", ".", "", "a\\b", "\0")],
)
def test_shared_parts_are_names_and_nothing_else(sharing: Path, content: str) -> None:
    (sharing / SHARED_PARTS_FILE).write_text(content)
    with pytest.raises(
        CheckpointError, match=f"{SHARED_PARTS_FILE} (holds|cannot be read) .*; download the model agai"
    ):
        ModelFiles.open(sharing)


def test_a_damaged_demo_model_is_restored_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Path(shutil.copytree(DEMO_DIRECTORY, tmp_path / "demo"))
    monkeypatch.setattr(model_files, "DEMO_DIRECTORY", demo)
    monkeypatch.setattr(model_files, "DEMO_DIRECTORIES", {"demo": demo, "demo-image": demo / "image_to_video"})
    truncate(next((demo / "vae").glob("*.safetensors")))
    restore = re.escape("; it is part of comfy-tpu, restore it: git -C ")
    for model in ("demo", "demo-image"):
        with pytest.raises(CheckpointError, match=f"weights of its vae cannot be used: .*{restore}"):
            ModelFiles.open(model)
    shutil.rmtree(demo / "vae")
    shutil.rmtree(demo / "image_to_video" / "image_processor")
    with pytest.raises(
        CheckpointError, match="model=demo-image lacks vae, image_processor; .*: it is part of comfy-tpu"
    ):
        ModelFiles.open("demo-image")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("", "model is empty; give a directory"),
        ("/no/such/directory", "is not a directory; give one, a hub id"),
        ("nothing", "is not a directory; give one, a hub id"),
        (__file__, "is a file; give a model directory"),
    ],
)
def test_a_name_that_is_no_model_is_refused(model: str, text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        ModelFiles.open(model)


def test_the_directory_may_bring_its_own_defaults(directory: Path) -> None:
    (directory / "generation.json").write_text('{"height": 64, "width": 96, "num_frames": 17}')
    defaults = ModelFiles.open(directory).defaults
    assert (defaults.height, defaults.width, defaults.num_frames, defaults.fps) == (64, 96, 17, 16)
    (directory / "generation.json").write_text('{"hight": 64}')
    with pytest.raises(CheckpointError, match="names hight, which is no setting"):
        _ = ModelFiles.open(directory).defaults


def test_a_file_that_cannot_be_read_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk or a network file system may refuse it after the model was opened."""
    files = ModelFiles.open(directory)

    def fail(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(
        CheckpointError, match=r"config.json cannot be read \(Input/output error\); look at the disk, or"
    ):
        _ = files.fingerprint


def test_the_fingerprint_follows_configs_and_weights(directory: Path) -> None:
    before = ModelFiles.open(directory).fingerprint
    assert ModelFiles.open(directory).fingerprint == before
    edit(directory / "vae" / "config.json", latents_mean=[0.0] * 4)
    changed = ModelFiles.open(directory).fingerprint
    assert changed != before
    seen = {before, changed}
    path = next((directory / "transformer").glob("*.safetensors"))
    tensors = load_file(path)
    for name in list(tensors):
        # A fine-tune: the same names and shapes, one tensor's values.
        save_file({**tensors, name: tensors[name] + 1}, path)
        seen.add(ModelFiles.open(directory).fingerprint)
    assert len(seen) == 2 + len(tensors)
    (directory / "tokenizer" / "tokenizer.json").write_text("{}")
    assert ModelFiles.open(directory).fingerprint not in seen
