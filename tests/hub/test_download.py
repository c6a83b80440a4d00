"""Downloads from a hub on this machine: the chosen files, resumed, checked, refused in one sentence each."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from comfy_tpu.cli import main
from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError, UnsupportedError
from comfy_tpu.families.registry import model_cards
from comfy_tpu.hub import disk, download
from comfy_tpu.hub.download import ALLOW_VARIABLE, Transfer, check_allowed, download_model
from comfy_tpu.hub.selection import RemoteFile, select_files
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from tests.hub.fake_hub import COMMIT, FakeHub, serve, sha256

MODEL = "owner/model"
INDEX = json.loads((DEMO_DIRECTORY / "model_index.json").read_text())


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


SHARDS = [f"transformer/diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
NEEDED = {
    "model_index.json": json.dumps(INDEX).encode(),
    "scheduler/scheduler_config.json": b"{}",
    "text_encoder/config.json": b"{}",
    "text_encoder/model.safetensors": noise(5000, 1),
    "tokenizer/spiece.model": b"words",
    "tokenizer/tokenizer_config.json": b"{}",
    "transformer/config.json": json.dumps({"num_layers": 2}).encode(),
    "transformer/diffusion_pytorch_model.safetensors.index.json": b'{"weight_map": {}}',
    SHARDS[0]: noise(300_000, 2),
    SHARDS[1]: noise(200_000, 3),
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.safetensors": noise(4000, 4),
}
OTHERS = {
    "README.md": b"words",
    "whole-model.safetensors": noise(9000, 5),
    "safety_checker/model.safetensors": noise(2000, 6),
    "text_encoder/model.fp16.safetensors": noise(2500, 7),
    "text_encoder/pytorch_model.bin": noise(5000, 8),
    "transformer/diffusion_pytorch_model.safetensors": noise(6000, 9),
    "transformer/diffusion_pytorch_model.fp16.safetensors.index.json": b"{}",
    "transformer/diffusion_pytorch_model.fp16-00001-of-00001.safetensors": noise(3000, 10),
    "assets/picture.png": b"pixels",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with serve(FakeHub({**NEEDED, **OTHERS})) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is lost when a connection ends
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
        yield served


def contents(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("own", [True, False], ids=["a directory", "the hub's cache"])
def test_the_needed_files_come_with_their_bytes_counted(hub, tmp_path, own):
    seen: list[Transfer] = []
    directory = download_model(MODEL, directory=tmp_path / "own" if own else None, on_progress=seen.append)
    assert contents(directory) == NEEDED
    total = sum(map(len, NEEDED.values()))
    assert (seen[-1].done, seen[-1].total) == (total, total)
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    if not own:
        assert directory == tmp_path / "hub" / "models--owner--model" / "snapshots" / COMMIT
        assert not list((tmp_path / "hub").rglob("*.partial"))


def test_a_second_download_transfers_nothing(hub, tmp_path):
    download_model(MODEL, directory=tmp_path)
    hub.requests.clear()
    seen: list[Transfer] = []
    download_model(MODEL, directory=tmp_path, on_progress=seen.append)
    assert not [path for method, path, _ in hub.requests if method == "GET" and path.endswith(".safetensors")]
    assert seen[0].done == seen[0].total


def test_a_connection_that_ends_early_is_taken_up_where_it_stopped(hub, tmp_path):
    hub.closes_after[SHARDS[0]] = [100_000, 50_000]
    assert contents(download_model(MODEL, directory=tmp_path)) == NEEDED
    assert hub.bodies(SHARDS[0]) == ["", "bytes=100000-", "bytes=150000-"]


@pytest.mark.parametrize("own", [True, False], ids=["a directory", "the hub's cache"])
def test_a_cancelled_download_goes_on_with_the_bytes_it_has(hub, tmp_path, own):
    place = tmp_path / "own" if own else None
    stopped = False

    def stop(transfer: Transfer) -> None:
        nonlocal stopped
        stopped = stopped or (transfer.file == SHARDS[0] and transfer.done > 0)

    with pytest.raises(download.DownloadCancelledError):
        download_model(MODEL, directory=place, on_progress=stop, is_cancelled=lambda: stopped, workers=1)
    hub.requests.clear()
    seen: list[Transfer] = []
    assert contents(download_model(MODEL, directory=place, on_progress=seen.append)) == NEEDED
    assert hub.bodies(SHARDS[0]) == ["bytes=10000-"]
    assert seen[-1].done == seen[-1].total


def test_a_server_without_ranges_sends_the_file_again(hub, tmp_path):
    hub.closes_after[SHARDS[0]], hub.ignores_ranges = [100_000], True
    seen: list[Transfer] = []
    assert contents(download_model(MODEL, directory=tmp_path, on_progress=seen.append)) == NEEDED
    assert seen[-1].done == seen[-1].total


def test_damaged_bytes_are_refused_and_come_anew(hub, tmp_path):
    partial = tmp_path / ".cache" / "comfy-tpu" / f"{sha256(NEEDED[SHARDS[1]])}.comfy-tpu.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\0" * 1000)
    with pytest.raises(CheckpointError, match=r"-00002-of-00002.safetensors came damaged .*; start again"):
        download_model(MODEL, directory=tmp_path)
    assert contents(download_model(MODEL, directory=tmp_path)) == NEEDED


def test_a_file_of_another_size_than_announced_is_refused(hub, tmp_path):
    hub.claimed_sizes[SHARDS[1]] = 250_000
    with pytest.raises(CheckpointError, match=r"ended after 200000 bytes, expected 250000; start again"):
        download_model(MODEL, directory=tmp_path)


def test_room_is_looked_for_before_weights_come(hub, tmp_path, monkeypatch):
    free = 100_000 + disk.RESERVE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, free))
    with pytest.raises(InvalidValueError, match="set HF_HOME to a directory on a larger disk, or give one with") as met:
        download_model(MODEL)
    assert f"needs 509 kB more in {tmp_path}" in str(met.value)
    assert f"its disk {disk.find_disk(tmp_path)} has 1.0 GB free" in str(met.value)
    with pytest.raises(InvalidValueError, match="give a directory on a larger disk"):
        download_model(MODEL, directory=tmp_path / "own")
    assert not [path for method, path, _ in hub.requests if method == "GET" and path.endswith(".safetensors")]


def test_what_is_there_needs_no_room(hub, tmp_path, monkeypatch):
    download_model(MODEL, directory=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 0))
    assert contents(download_model(MODEL, directory=tmp_path)) == NEEDED


REFUSALS = {
    (403, "GatedRepo"): r"model=owner/model is gated: .*accept its licence.*hf auth login",
    (404, "RepoNotFound"): r"model=owner/model is not on the hub, or is private; check the name",
    (401, "RepoNotFound"): r"model=owner/model is not on the hub, or is private; check the name",
    (500, "Broken"): r"model=owner/model: http://127.0.0.1:\d+ refused \(.*\); try again later",
}


@pytest.mark.parametrize(("refusal", "sentence"), REFUSALS.items(), ids=[f"{code}" for code, _ in REFUSALS])
def test_refusals_of_the_hub_are_a_sentence_each(hub, tmp_path, refusal, sentence):
    hub.refusal = refusal
    with pytest.raises(CheckpointError, match=sentence) as met:
        download_model(MODEL, directory=tmp_path)
    assert "\n" not in str(met.value)


def test_other_reasons_are_a_sentence_each(hub, tmp_path, monkeypatch):
    def reason(model: str = MODEL, **chosen: str) -> str:
        with pytest.raises(ComfyTpuError) as met:
            download_model(model, directory=tmp_path, **chosen)
        return str(met.value)

    assert "revision=v9 does not exist in owner/model" in reason(revision="v9")
    assert "model=a/b/c is no hub id" in reason("a/b/c")
    hub.files["model_index.json"] = json.dumps({**INDEX, "_class_name": "OtherPipeline"}).encode()
    assert "the model is a OtherPipeline; supported are" in reason()
    del hub.files["model_index.json"]
    assert "has no model_index.json: it is no model in diffusers' layout" in reason()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in reason()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "cannot be downloaded offline" in reason()


def test_an_unsupported_model_is_refused_before_its_weights(hub, tmp_path):
    hub.files["model_index.json"] = json.dumps({**INDEX, "_class_name": "OtherPipeline"}).encode()
    with pytest.raises(UnsupportedError):
        download_model(MODEL, directory=tmp_path)
    assert not [path for _, path, _ in hub.requests if path.endswith(".safetensors")]


def test_a_large_download_is_to_be_allowed(hub, monkeypatch):
    """What a node asks before it opens a model. Nothing large comes for the question."""
    hub.claimed_sizes = dict.fromkeys(SHARDS, 30 * 10**9)
    sentence = (
        r"model_id=owner/model needs a download of 60 GB to .*hub \(licence: not stated\).* run "
        r"`comfy-tpu download owner/model`, .*allow_download.*COMFY_TPU_ALLOW_DOWNLOAD=1"
    )
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    with pytest.raises(InvalidValueError, match=sentence) as caught:
        check_allowed(MODEL, field="model_id")
    assert caught.value.field == "model_id"
    assert not [path for method, path, _ in hub.requests if method == "GET" and path.endswith("safetensors")]
    for refusing in ("0", "", "no", "false"):
        monkeypatch.setenv(ALLOW_VARIABLE, refusing)
        with pytest.raises(InvalidValueError):
            check_allowed(MODEL, field="model_id")
    for allowing in ("1", "True"):
        monkeypatch.setenv(ALLOW_VARIABLE, allowing)
        check_allowed(MODEL, field="model_id")


def test_what_is_here_or_small_or_not_to_be_had_needs_no_leave(hub, monkeypatch):
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    check_allowed(MODEL, field="model_id")
    monkeypatch.setattr(download, "ALLOWED_BYTES", 0)
    with pytest.raises(InvalidValueError):
        check_allowed(MODEL, field="model_id")
    download_model(MODEL)
    check_allowed(MODEL, field="model_id")
    hub.refusal = (404, "RepoNotFound")
    check_allowed("owner/other", field="model_id")


def test_the_licence_of_a_published_model_is_named(hub, monkeypatch):
    card = dataclasses.replace(next(iter(model_cards())), licences={MODEL: "Apache 2.0"})
    monkeypatch.setattr(download, "find_published", lambda model: (MODEL, card))
    monkeypatch.setattr(download, "ALLOWED_BYTES", 0)
    with pytest.raises(InvalidValueError, match="licence: Apache 2.0"):
        check_allowed(MODEL, field="model_id")


def test_only_a_variant_is_better_than_nothing():
    names = ["model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.fp16.safetensors", "vae/x.bin"]
    chosen = select_files([RemoteFile(name, 1) for name in names], {"vae": ["diffusers", "AutoencoderKL"]}, MODEL)
    assert [file.name for file in chosen] == ["model_index.json", "vae/config.json", names[2]]


def test_a_component_is_a_folder_inside_the_models():
    names = ["model_index.json", "../x.json", "vae/config.json", "/etc/x.json"]
    pair = ["diffusers", "AutoencoderKL"]
    chosen = select_files([RemoteFile(name, 1) for name in names], {"..": pair, "vae": pair, "/etc": pair}, MODEL)
    assert [file.name for file in chosen] == ["model_index.json", "vae/config.json"]


def test_a_disk_is_named_by_its_mount_and_device(tmp_path):
    found = disk.find_disk(tmp_path / "not" / "there")
    assert found.path.is_mount()
    assert found.free_bytes > 0
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n/dev/sdb /mnt/my\\040disk ext4 rw 0 0\n")
    assert disk._device(Path("/mnt/my disk"), mounts) == "/dev/sdb"
    assert disk._device(Path("/elsewhere"), mounts) == ""


def test_an_unknown_key_stops_a_download_before_the_weights(hub, tmp_path, capsys):
    for part in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler"):
        for path in (DEMO_DIRECTORY / part).glob("*config.json"):
            hub.files[f"{part}/{path.name}"] = path.read_bytes()
    known = json.loads(hub.files["vae/config.json"])
    hub.files["vae/config.json"] = json.dumps({**known, "wavelets": True}).encode()
    arguments = ["download", MODEL, "--local-dir", str(tmp_path / "model")]

    assert main.main(arguments) != 0
    said = capsys.readouterr().err
    assert "vae/config.json has wavelets, which AutoencoderKLWan of diffusers" in said
    assert "--ignore-config-key wavelets" in said
    assert not [path for _, path, _ in hub.requests if path.endswith(".safetensors")]
    assert main.main([*arguments, "--ignore-config-key", "wavelets"]) == 0
