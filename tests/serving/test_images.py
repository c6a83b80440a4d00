"""Images: the answer is the image."""

import base64
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
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, service, _):
        files = {"image": ("x.png", png(16, 16))}
        answer = client.post("/v1/images/edits", data={"prompt": "a cat"}, files=files)
        assert answer.status_code == 200, answer.text
        (record,) = service.ledger.list_jobs(None, "image", limit=9)
        (path,) = record.request.values["image"]
        assert Path(path).read_bytes() == png(16, 16)
        service.remove(record)
        assert not Path(path).exists()


def test_an_image_that_fails(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, _):
        answer = client.post("/v1/images/generations", json={"prompt": "fail"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "ValueError: no such luck"


def test_images_as_jobs(tmp_path: Path) -> None:
    """The routes of videos, for a client that does not wait."""
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, _):
        made = client.post("/v1/images", json={"prompt": "a cat", "num_videos": 2}).json()
        assert (made["object"], made["settings"]["num_videos"]) == ("image", 2)
        done = wait_for(client, made["id"], "completed", path="/v1/images")
        assert done["progress"] == 100
        for index, status in ((0, 200), (1, 200), (2, 409), (-1, 409)):
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
