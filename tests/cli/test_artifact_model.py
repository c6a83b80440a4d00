"""Which model `denoise` and `decode` open when --model is not given: what a file names is never downloaded."""

import shutil
import socket
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from comfy_tpu.cli import main as cli
from comfy_tpu.config import GenerationSettings
from comfy_tpu.pipeline import artifacts, video
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY, find_local
from tests.cli.fake_pipeline import FakePipeline

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Model:
    model_fingerprint, dtype_name = "ab12", "float32"

    def __init__(self, name: str) -> None:
        self.model_name = name


def artifact(path: Path, model: str) -> str:
    """A text for `denoise`, or latents for `decode`, by the name of the file."""
    if path.stem == "text":
        embeddings = PromptEmbeddings("x", {"text": torch.zeros(1, 2, 3)}, None, "")
        artifacts.save_text(path, embeddings, GenerationSettings(), Model(model))
    else:
        artifacts.save_latents(path, torch.zeros(1, 1, 1, 1, 1), "x", GenerationSettings(), Model(model))
    return str(path)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty hub cache, and a network at which every attempt fails the test."""

    def attempt(*arguments: object, **more: object) -> None:
        pytest.fail(f"the network was asked for {arguments}")

    directory = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, attempt)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, attempt)
    monkeypatch.chdir(tmp_path)
    return directory


@pytest.fixture
def cached(cache: Path) -> Path:
    """The directory of owner/name, as an earlier download left it."""
    repository = cache / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    ignored = shutil.ignore_patterns("image_to_video")
    return shutil.copytree(DEMO_DIRECTORY, repository / "snapshots" / COMMIT, ignore=ignored)


STAGES = [("denoise", "text.safetensors"), ("decode", "latents.safetensors")]


@pytest.mark.parametrize(("command", "file"), STAGES)
def test_a_hub_model_that_is_not_here_is_refused(command, file, cache, capsys):
    assert cli.main([command, artifact(Path(file), "owner/name")]) == 1
    assert capsys.readouterr() == (
        "",
        f"comfy-tpu: {file} was made with owner/name, which is not on this machine; "
        "add --model owner/name to download it\n",
    )
    assert not cache.exists()


@pytest.mark.parametrize(("command", "file"), STAGES)
def test_a_directory_that_is_not_here_is_refused(command, file, cache, capsys):
    for name in ("models/my/wan", "http://host/model", "//host/share", "~/wan", "a\0b", "x" * 5000, "a/b c", ""):
        assert cli.main([command, artifact(Path(file), name)]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith(f"comfy-tpu: {file} was made with ")
        assert shown.endswith(", and there is no such directory here; add --model and the model's directory\n")


@pytest.mark.parametrize(("command", "file"), STAGES)
def test_a_hub_model_that_was_downloaded_is_opened_by_its_name(command, file, cached, monkeypatch, capsys):
    opened = []

    class Recorded(FakePipeline):
        @classmethod
        def open(cls, model="demo", runtime=None, *, name=None, **more):
            opened.append((model, name))
            return super().open("demo", runtime, **more)

    monkeypatch.setattr(video, "VideoPipeline", Recorded)
    assert cli.main([command, artifact(Path(file), "owner/name")]) == 1  # the fake model cannot read it
    assert opened == [(cached, "owner/name")]


def test_the_real_model_is_opened_without_the_network(cached, capsys):
    text = artifact(Path("text.safetensors"), "owner/name")
    assert cli.main(["denoise", text, "--mesh", "dp=99"]) == 1
    assert capsys.readouterr().err.startswith("comfy-tpu: --mesh dp=99,sp=1,tp=1 needs 99 devices")


def test_a_model_that_is_named_by_the_user_is_downloaded(cache, monkeypatch, capsys):
    asked = []

    def download(model, **more):
        asked.append((model, more.get("local_files_only", False)))
        raise OSError("no network here")

    def list_files(model, **more):
        asked.append(model)
        raise ConnectionError("no network here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, model, **more: list_files(model, **more))
    text = artifact(Path("text.safetensors"), "demo")
    assert cli.main(["denoise", text, "--model", "owner/name"]) == 1
    assert asked == ["owner/name", ("owner/name", False)]
    assert "could not be downloaded from the hub (no network here)" in capsys.readouterr().err


def test_demo_models_and_directories_are_followed(cache, tmp_path):
    assert find_local("demo") == DEMO_DIRECTORY
    assert find_local("demo-image") == DEMO_DIRECTORY / "image_to_video"
    assert find_local(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert find_local("owner/name") == Path("owner/name")


def test_a_directory_of_another_machine_is_not_looked_up(cache, tmp_path):
    assert find_local(f"/{tmp_path}") is None  # //tmp/…, which Linux takes for /tmp/…
