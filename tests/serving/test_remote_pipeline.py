"""A pipeline on a real server with the demo model: the same bits as here, restarts, and Cancel."""

import dataclasses
import functools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from comfy_tpu.pipeline.embeddings import TimedEmbeddings
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.remote.pipeline import RemotePipeline, read_preview
from comfy_tpu.remote.runner import Callbacks, LostError
from tests.serving.real_server import RealServer

pytestmark = pytest.mark.slow

CHOSEN = {"num_inference_steps": 4, "seed": 7, "num_frames": 17}


@functools.cache
def local() -> VideoPipeline:
    return VideoPipeline.open("demo")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(tmp_path_factory.mktemp("served")) as server:
        yield server


def test_every_stage_gives_the_same_bits(server: RealServer) -> None:
    remote = RemotePipeline.open(server.client, "demo")
    settings = remote.settings(**CHOSEN)
    assert settings == local().settings(**CHOSEN)
    ours, theirs = (each.encode("a red circle moving right", settings) for each in (local(), remote))
    for branch in ("positive", "negative"):
        assert torch.equal(getattr(ours, branch)["text"], getattr(theirs, branch)["text"])
    latents = local().denoise(ours, settings)
    assert torch.equal(latents, remote.denoise(theirs, settings))
    assert torch.equal(local().to_vae_scale(latents), remote.to_vae_scale(latents))
    frames = torch.cat(list(local().decode(latents, settings)), dim=1)
    assert torch.equal(frames, torch.cat(list(remote.decode(latents, settings)), dim=1))


def test_prompts_that_follow_each_other_give_the_same_bits(server: RealServer) -> None:
    remote = RemotePipeline.open(server.client, "demo")
    settings = remote.settings(**CHOSEN)
    first, second = (local().encode(f"a {colour} circle", settings) for colour in ("red", "blue"))
    timed = dataclasses.replace(
        first,
        timed_positive=(TimedEmbeddings(0.0, 0.5, first.positive), TimedEmbeddings(0.5, 1.0, second.positive)),
    )
    latents = remote.denoise(timed, settings)
    assert torch.equal(latents, local().denoise(timed, settings))
    assert not torch.equal(latents, local().denoise(first, settings))


def test_progress_and_previews_come(server: RealServer) -> None:
    reports = []
    callbacks = Callbacks(reports.append, read_preview=read_preview)
    remote = RemotePipeline.open(server.client, "demo", callbacks)
    settings = remote.settings(**{**CHOSEN, "num_inference_steps": 30})
    remote.denoise(local().encode("a red circle", settings), settings)
    steps = [report for report in reports if report.stage == "denoising"]
    assert [report.done for report in steps] == sorted(report.done for report in steps)
    assert all((report.total, report.size) == (30, "64×64×17") for report in steps)
    previews = [report.preview() for report in steps if report.preview is not None]
    assert previews
    assert all(preview.shape == local().latent_shape(settings) for preview in previews)


def test_results_and_inputs_are_removed_when_they_are_fetched(server: RealServer) -> None:
    remote = RemotePipeline.open(server.client, "demo")
    directory = Path(str(server._arguments[3]))
    remote.encode_text("a red circle", remote.settings())
    assert list(directory.glob("stage_*")) == []
    assert list((directory / "inputs").iterdir()) == []


def test_nothing_of_jax_is_imported(server: RealServer) -> None:
    script = (
        "import sys, json\n"
        "from comfy_tpu.remote.client import ServerClient\n"
        "from comfy_tpu.remote.keys import parse_address\n"
        "from comfy_tpu.remote.pipeline import RemotePipeline\n"
        f"remote = RemotePipeline.open(ServerClient(parse_address({server.url!r})), 'demo')\n"
        "settings = remote.settings(num_inference_steps=2, num_frames=17)\n"
        "latents = remote.denoise(remote.encode('a red circle', settings), settings)\n"
        "frames = next(remote.decode(latents, settings))\n"
        "print(json.dumps([list(frames.shape), sorted({'jax', 'torchax', 'diffusers'} & set(sys.modules))]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, 17, 64, 64, 3], []]


class CancelledError(Exception):
    pass


def test_cancel_reaches_the_device_within_a_step(tmp_path: Path) -> None:
    with RealServer(tmp_path, step_seconds=0.5) as server:
        at_cancel = []

        def report(progress):
            if progress.stage == "denoising" and progress.done == 3:
                at_cancel.append(server.steps())
                raise CancelledError

        remote = RemotePipeline.open(server.client, "demo", Callbacks(report))
        settings = remote.settings(num_inference_steps=40)
        embeddings = local().encode("a red circle", settings)
        with pytest.raises(CancelledError):
            remote.denoise(embeddings, settings)
        time.sleep(2.0)  # four steps, were it not cancelled
        assert server.steps() - at_cancel[0] <= 1
        remote = RemotePipeline.open(server.client, "demo")  # the device is free
        settings = remote.settings(num_inference_steps=1)
        remote.denoise(embeddings, settings)


def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Its job goes on from its ledger, and gives the same bits."""
    with RealServer(tmp_path, step_seconds=0.2) as server:
        waited: list[float] = []
        killed = threading.Event()

        def report(progress):
            if progress.stage == "denoising" and progress.done == 3 and not killed.is_set():
                killed.set()
                server.end(signal.SIGKILL)
                server.start()

        callbacks = Callbacks(report, on_waiting=waited.append)
        remote = RemotePipeline.open(server.client, "demo", callbacks, wait_seconds=120)
        settings = remote.settings(num_inference_steps=8, seed=3)
        embeddings = local().encode("a red circle", settings)
        made = remote.denoise(embeddings, settings)
        assert killed.is_set()
        assert waited
        assert torch.equal(made, local().denoise(embeddings, settings))


def test_a_server_that_is_killed_and_stays_away(tmp_path: Path) -> None:
    with RealServer(tmp_path, step_seconds=0.2) as server:

        def report(progress):
            if progress.stage == "denoising" and progress.done == 3:
                server.end(signal.SIGKILL)

        remote = RemotePipeline.open(server.client, "demo", Callbacks(report), wait_seconds=2)
        settings = remote.settings(num_inference_steps=40)
        embeddings = local().encode("a red circle", settings)
        with pytest.raises(LostError) as caught:
            remote.denoise(embeddings, settings)
        assert "at step 3/40, and was not back within 2 s; start it again with `comfy-tpu serve`" in str(caught.value)
        server.start()
        server.wait_until_ready()
        remote = RemotePipeline.open(server.client, "demo")
        settings = remote.settings(num_inference_steps=2)
        remote.denoise(embeddings, settings)
        assert server.steps() < 40  # the job that was given up is cancelled, and not waited for


def test_the_demo_that_begins_with_an_image_gives_the_same_bits(tmp_path: Path) -> None:
    image = Image.linear_gradient("L").convert("RGB")
    with RealServer(tmp_path, models=["demo-image"]) as server:
        ours, remote = VideoPipeline.open("demo-image"), RemotePipeline.open(server.client, "demo-image")
        settings = remote.settings(**CHOSEN)
        mine, theirs = (each.encode("a red circle", settings, [image]) for each in (ours, remote))
        assert sorted(mine.shared) == sorted(theirs.shared)
        assert all(torch.equal(mine.shared[name], theirs.shared[name]) for name in mine.shared)
        assert torch.equal(ours.denoise(mine, settings), remote.denoise(theirs, settings))
