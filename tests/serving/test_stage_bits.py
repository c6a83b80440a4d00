"""The stages of the demo model over HTTP, in this process: the same bits as without."""

import contextlib
import functools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import uvicorn
from safetensors.torch import save_file

from comfy_tpu.config import Lora
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.local_worker import LocalWorker
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.remote.client import RefusedError, ServerClient
from comfy_tpu.remote.keys import parse_address
from comfy_tpu.remote.pipeline import RemotePipeline, read_preview
from comfy_tpu.remote.runner import Callbacks
from comfy_tpu.serving.api import make_app
from comfy_tpu.serving.config import ServeConfig
from comfy_tpu.serving.served_model import open_served_model
from comfy_tpu.serving.service import Service

CHOSEN = {"num_inference_steps": 2, "seed": 7, "num_frames": 17}


@functools.cache
def local() -> VideoPipeline:
    return VideoPipeline.open("demo")


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's directory of LoRAs."""
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="module")
def client(loras: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerClient]:
    directory = tmp_path_factory.mktemp("served")
    config = ServeConfig(("demo",), directory, lora_directory=loras)
    listening = socket.create_server(("127.0.0.1", 0))
    service = Service(config, {"demo": open_served_model("demo")}, LocalWorker)
    with contextlib.closing(service):
        service.start()
        server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield ServerClient(parse_address(f"http://127.0.0.1:{listening.getsockname()[1]}"))
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.slow
def test_every_stage(client: ServerClient) -> None:
    reports = []
    remote = RemotePipeline.open(client, "demo", Callbacks(reports.append, read_preview=read_preview))
    settings = remote.settings(**CHOSEN)
    ours, theirs = (each.encode("a red circle moving right", settings) for each in (local(), remote))
    assert torch.equal(ours.positive["text"], theirs.positive["text"])
    latents = local().denoise(ours, settings)
    assert torch.equal(latents, remote.denoise(theirs, settings))
    frames = torch.cat(list(local().decode(latents, settings)), dim=1)
    assert torch.equal(frames, torch.cat(list(remote.decode(latents, settings)), dim=1))
    previews = [each.preview() for each in reports if each.preview is not None]
    assert all(each.shape == latents.shape for each in previews)


@pytest.mark.slow
def test_a_lora_of_the_server(client: ServerClient, loras: Path) -> None:
    checkpoint = local().files.checkpoint(local().family.transformer)
    name = next(name for name in checkpoint.tensors if "attn1.to_q.weight" in name)
    rows, columns = checkpoint.tensors[name].shape
    module = name.removesuffix(".weight")
    tensors = {
        f"transformer.{module}.lora_A.weight": torch.ones(1, columns),
        f"transformer.{module}.lora_B.weight": torch.ones(rows, 1),
    }
    save_file(tensors, loras / "ones.safetensors")
    elsewhere = loras.parent / "ones.safetensors"
    elsewhere.write_bytes((loras / "ones.safetensors").read_bytes())
    lora = Lora(elsewhere, 0.25)
    remote = RemotePipeline.open(client, "demo", loras=[lora])
    settings = remote.settings(**CHOSEN)
    embeddings = local().encode("a red circle", settings)
    plain = local().denoise(embeddings, settings)
    local().use_loras([lora])
    try:
        changed = local().denoise(embeddings, settings)
    finally:
        local().use_loras([])
    assert not torch.equal(plain, changed)
    assert torch.equal(remote.denoise(embeddings, settings), changed)
    assert torch.equal(RemotePipeline.open(client, "demo").denoise(embeddings, settings), plain)
    save_file({**tensors, "other": torch.ones(1)}, elsewhere)
    with pytest.raises(RefusedError, match="another file here than at the client"):
        RemotePipeline.open(client, "demo", loras=[Lora(elsewhere)]).denoise(embeddings, settings)


@pytest.mark.slow  # by default: tests/remote/test_client.py, and a running job in test_api.py
def test_cancel_frees_the_worker(client: ServerClient) -> None:
    class CancelledError(Exception):
        pass

    def cancel(progress: object) -> None:
        raise CancelledError

    remote = RemotePipeline.open(client, "demo", Callbacks(cancel))
    settings = remote.settings(**{**CHOSEN, "num_inference_steps": 100})
    embeddings = local().encode("a red circle", settings)
    with pytest.raises(CancelledError):
        remote.denoise(embeddings, settings)
    free = RemotePipeline.open(client, "demo")
    settings = free.settings(**CHOSEN)
    assert torch.equal(free.denoise(embeddings, settings), local().denoise(embeddings, settings))


@pytest.mark.slow
def test_a_preset_of_the_servers_model_with_its_lora(client: ServerClient) -> None:
    remote = RemotePipeline.open(client, "demo", preset="4step")
    local().use_loras([], "4step")
    try:
        assert remote.preset.settings == local().preset.settings
        settings = remote.settings(seed=7, **remote.preset.settings)
        embeddings = local().encode("a red circle", settings)
        few = local().denoise(embeddings, settings)
    finally:
        local().use_loras([])
    assert torch.equal(remote.denoise(embeddings, settings), few)
    assert not torch.equal(local().denoise(embeddings, settings), few)
    with pytest.raises(InvalidValueError, match="preset=9step is unknown for model demo; choose from 4step, or auto"):
        RemotePipeline.open(client, "demo", preset="9step")
    assert RemotePipeline.open(client, "demo", preset="auto").preset.name is None
