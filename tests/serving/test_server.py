"""A real server with real models, and OpenAI's own client, unmodified."""

import base64
import io
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.video_files import open_video
from tests.families import small_flux2
from tests.serving.real_server import RealServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]


ROOT = Path(__file__).parents[2]


def connect(server: RealServer) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    with RealServer(tmp_path / "served") as server:
        yield server


def test_videos(server: RealServer) -> None:
    client = connect(server)
    assert [model.id for model in client.models.list()] == ["demo"]
    chosen = {"seed": 7, "num_inference_steps": 4}
    made = client.videos.create(model="demo", prompt="a red circle moving left", size="64x64", extra_body=chosen)
    video = client.videos.poll(made.id, poll_interval_ms=100)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    content = client.videos.download_content(video.id).read()
    assert content[4:8] == b"ftyp"
    assert [each.id for each in client.videos.list()] == [video.id]
    assert client.videos.delete(video.id).deleted
    assert list(client.videos.list()) == []
    server.end(signal.SIGTERM)
    assert server.process is not None
    assert server.process.returncode is not None


def test_a_second_pass(server: RealServer, tmp_path: Path) -> None:
    client = connect(server)
    chosen = {"seed": 7, "num_inference_steps": 2, "upscale": 1.5, "upscale_by": "pixels"}
    made = client.videos.create(model="demo", prompt="a red circle moving left", size="64x64", extra_body=chosen)
    video = client.videos.poll(made.id, poll_interval_ms=100)
    assert (video.status, video.size, video.error) == ("completed", "96x96", None)
    path = tmp_path / "larger.mp4"
    client.videos.download_content(video.id).write_to_file(path)
    assert open_video(path, "video").size == (96, 96)
    assert json.loads(media.read_metadata(path)["second_pass"])["from"] == "64x64"


def test_images(tmp_path: Path) -> None:
    model = str(small_flux2.directory("klein"))
    with RealServer(tmp_path / "served", models=[model]) as server:
        client = connect(server)
        chosen = {"seed": 7, "num_inference_steps": 2}
        made = client.images.generate(model=model, prompt="a red circle", size="64x64", n=2, extra_body=chosen)
        images = [_read(each) for each in made.data]
        assert [image.size for image in images] == [(64, 64)] * 2
        assert images[0].tobytes() != images[1].tobytes()
        edited = client.images.edit(
            model=model, image=_png(images[0]), prompt="a blue circle", size="64x64", extra_body=chosen
        )
        (image,) = map(_read, edited.data)
        assert image.size == (64, 64)
        assert image.tobytes() not in {each.tobytes() for each in images}


def test_the_script_of_the_documents(tmp_path: Path) -> None:
    """Word by word, but for the server's address, a model of 4 billion weights, and its size."""
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("serve.md", "serve.zh-CN.md")]
    script, chinese = (re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0] for page in pages)
    assert script == chinese
    model = str(small_flux2.directory("klein"))
    with RealServer(tmp_path / "served", models=["demo", model]) as server:
        script = script.replace("http://127.0.0.1:8000", server.url)
        script = script.replace("black-forest-labs/FLUX.2-klein-4B", model).replace("1024x1024", "64x64")
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
        ran = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=500)
        assert re.fullmatch(r"video_\w{24} completed a red circle moving left\n", ran.stdout)
        assert connect(server).videos.list().data == []
    assert (tmp_path / "circle.mp4").read_bytes()[4:8] == b"ftyp"
    images = [Image.open(tmp_path / name).convert("RGB") for name in ("red.png", "blue.png")]
    assert [image.size for image in images] == [(64, 64)] * 2
    assert images[0].tobytes() != images[1].tobytes()


def test_it_ends_while_somebody_follows_a_job(tmp_path: Path) -> None:
    """The page always does. The next server has the job."""
    with RealServer(tmp_path / "served", step_seconds=0.5) as server:
        client = connect(server)
        made = client.videos.create(model="demo", prompt="a red circle", extra_body={"num_inference_steps": 1000})
        with urllib.request.urlopen(f"{server.url}/v1/videos/{made.id}/events", timeout=60) as events:
            while b"denoising" not in events.readline():
                pass
            begun = time.monotonic()
            server.end(signal.SIGTERM)
            assert time.monotonic() - begun < 20
            events.read()
        server.start()
        server.wait_until_ready()
        assert client.videos.retrieve(made.id).status in ("queued", "in_progress")


def _read(given: Any) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(given.b64_json))).convert("RGB")


def _png(image: Image.Image) -> tuple[str, bytes]:
    content = io.BytesIO()
    image.save(content, "PNG")
    return "image.png", content.getvalue()


def test_jobs_survive_a_kill(server: RealServer, tmp_path: Path) -> None:
    """Killed with one job at work and others waiting: every one is done, once, after the next start."""
    client = connect(server)
    chosen = {"num_inference_steps": 20}
    made = [
        client.videos.create(model="demo", prompt="a red circle", extra_body={**chosen, "seed": seed})
        for seed in range(4)
    ]
    deadline = time.monotonic() + 60
    while client.videos.retrieve(made[0].id).status == "queued" and time.monotonic() < deadline:
        time.sleep(0.05)
    server.end(signal.SIGKILL)
    server.start()
    server.wait_until_ready()
    for each in made:
        assert client.videos.poll(each.id, poll_interval_ms=200).status == "completed"
        assert client.videos.download_content(each.id).read()[4:8] == b"ftyp"
    files = sorted(path.name for path in (tmp_path / "served").glob("*.mp4"))
    assert files == sorted(f"{each.id}.mp4" for each in made)
