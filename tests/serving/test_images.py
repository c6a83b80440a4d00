"""Images: the answer is the image."""

import base64
from pathlib import Path

from tests.families import small_flux
from tests.serving.stand_in import running
from tests.serving.test_api import png


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


def test_a_model_of_images_makes_no_videos(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, _):
        answer = client.post("/v1/videos", json={"prompt": "a cat"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
