"""Images: the answer is the image."""

import base64
import time
from pathlib import Path

from tests.families import small_flux
from tests.serving.stand_in import running
from tests.serving.test_api import png, wait_for


def test_images_are_in_the_answer(tmp_path: Path) -> None:
    model = str(small_flux.directory("dev"))
    with running(tmp_path, model) as (client, _, _):
        answer = client.post("/v1/images/generations", json={"model": model, "prompt": "a cat", "n": 2, "size": "auto"})
        assert answer.status_code == 200, answer.text
        assert [base64.b64decode(each["b64_json"]) for each in answer.json()["data"]] == [b"a cat"] * 2


def test_an_image_to_change(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, service, executor):
        files = {"image": ("x.png", png(16, 16))}
        made = client.post("/v1/images", data={"prompt": "wait"}, files=files).json()
        wait_for(client, made["id"], "in_progress", path="/v1/images")
        (path,) = executor.requests[-1].values["image"]
        assert Path(path).read_bytes() == png(16, 16)
        executor.may_go_on.set()
        assert wait_for(client, made["id"], "completed", path="/v1/images")["has_image"]
        deadline = time.monotonic() + 20
        while Path(path).exists():  # nobody needs it again
            assert time.monotonic() < deadline
        cancelled = client.post("/v1/images", data={"prompt": "wait"}, files=files).json()
        client.post(f"/v1/images/{cancelled['id']}/cancel")
        while list(service.inputs.glob("image_*")):
            assert time.monotonic() < deadline


def test_an_image_that_fails(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, _):
        answer = client.post("/v1/images/generations", json={"prompt": "fail"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "ValueError: no such luck: weights.safetensors"


def test_images_as_jobs(tmp_path: Path) -> None:
    """The routes of videos, for a client that does not wait."""
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, _):
        made = client.post("/v1/images", json={"prompt": "a cat", "num_videos": 2}).json()
        assert (made["object"], made["settings"]["num_videos"]) == ("image", 2)
        done = wait_for(client, made["id"], "completed", path="/v1/images")
        assert done["progress"] == 100
        for index, status in ((0, 200), (1, 200), (2, 400), (-1, 400)):
            content = client.get(f"/v1/images/{made['id']}/content", params={"index": index})
            assert content.status_code == status
        assert client.get(f"/v1/images/{made['id']}/content").headers["Content-Type"] == "image/png"
        assert client.get(f"/v1/videos/{made['id']}").status_code == 404
        assert [each["id"] for each in client.get("/v1/images").json()["data"]] == [made["id"]]
        assert client.get("/v1/videos").json()["data"] == []
        assert client.delete(f"/v1/images/{made['id']}").json()["object"] == "image.deleted"


def test_a_model_of_images_makes_no_videos(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, _):
        answer = client.post("/v1/videos", json={"prompt": "a cat"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
