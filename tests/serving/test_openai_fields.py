"""What OpenAI's client may send: it is done, or refused by the field's name."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.serving.image_answers import ImageFormat
from tests.families import small_flux
from tests.serving.stand_in import running
from tests.serving.test_api import png

GENERATE = "/v1/images/generations"


def refused(answer: Any, param: str) -> str:
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    return str(answer.json()["error"]["message"])


def test_fields_of_images(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, service, _):

        def send(**fields: Any) -> Any:
            return client.post(GENERATE, json={"prompt": "a cat", **fields})

        for name, value in (
            ("response_format", "url"),
            ("stream", True),
            ("partial_images", 2),
            ("background", "transparent"),
            ("quality", "best"),
            ("style", ["vivid"]),
            ("output_format", "gif"),
            ("output_compression", 101),
            ("output_compression", -1),
            ("output_compression", True),
            ("output_compression", "9" * 5000),
            ("output_compression", 50),  # of PNG
            ("n", 0),
            ("n", 65),
            ("n", "two"),
            ("steps", 0),
            ("guidance", -1),
            ("input_fidelity", "high"),
        ):
            message = refused(send(**{name: value}), name)
            assert name in message
            assert len(message) < 300
        assert "num_videos" not in refused(send(n=65), "n")
        assert service.ledger.counts().total == 0
        harmless = {
            "response_format": "b64_json",
            "stream": False,
            "partial_images": 0,
            "background": "auto",
            "quality": "high",
            "style": "vivid",
            "moderation": "low",
            "user": "u-1",
            "output_format": "png",
            "output_compression": 100,
            "size": "auto",
            "n": None,
        }
        answer = send(**harmless).json()
        assert (len(answer["data"]), answer["output_format"]) == (1, "png")


def test_formats(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.effect_noise((64, 64), 90).save(path)
    sizes = []
    for fields, kind in (
        ({}, "PNG"),
        ({"output_format": "jpeg"}, "JPEG"),
        ({"output_format": "jpeg", "output_compression": "20"}, "JPEG"),
        ({"output_format": "webp", "output_compression": 20}, "WEBP"),
    ):
        content = base64.b64decode(ImageFormat.read(fields).encode(path))
        with Image.open(io.BytesIO(content)) as image:
            assert (image.format, image.size) == (kind, (64, 64))
        sizes.append(len(content))
    assert sizes[2] < sizes[1]
    with pytest.raises(InvalidValueError, match="whole number from 0 to 100"):
        ImageFormat.read({"output_format": "jpeg", "output_compression": 1.5})


def test_a_format_is_of_answers_not_of_files(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, _):
        assert "/v1/images/generations" in refused(
            client.post("/v1/images", json={"prompt": "a", "output_format": "jpeg"}), "output_format"
        )
    with running(tmp_path / "videos") as (client, _, _):
        refused(client.post("/v1/videos", json={"prompt": "a", "output_format": "webp"}), "output_format")


def test_edits_need_an_image(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, _):
        refused(client.post("/v1/images/edits", data={"prompt": "a cat"}), "image")
        image = ("x.png", png(16, 16))
        mask = {"image": image, "mask": image}
        refused(client.post("/v1/images/edits", data={"prompt": "a"}, files=mask), "mask")
        two = [("image[]", image), ("image[]", image)]
        assert "starts from one" in refused(client.post("/v1/images/edits", data={"prompt": "a"}, files=two), "image")
        five = [("image[]", image)] * 5
        assert "4" in refused(client.post("/v1/images/edits", data={"prompt": "a"}, files=five), "image")


def test_the_strength_of_an_image_to_start_from(tmp_path: Path) -> None:
    with running(tmp_path, str(small_flux.directory("dev"))) as (client, _, executor):
        files = {"image": ("x.png", png(16, 16))}
        for strength in ("0", "1.5", "much", "nan"):
            order = {"prompt": "a", "strength": strength}
            refused(client.post("/v1/images/edits", data=order, files=files), "strength")
        refused(client.post(GENERATE, json={"prompt": "a", "strength": 0.5}), "strength")
        answer = client.post("/v1/images/edits", data={"prompt": "a", "strength": "0.5"}, files=files)
        assert answer.status_code == 200, answer.text
        assert executor.requests[-1].values["strength"] == 0.5


@pytest.mark.parametrize("count", [0, 2])
def test_as_many_images_as_the_model_takes(count: int, tmp_path: Path) -> None:
    """The demo model with an image takes one: not to be found out by a job that fails."""
    with running(tmp_path, "demo-image") as (client, service, _):
        files = [("image[]", ("x.png", png(16, 16)))] * count
        refused(client.post("/v1/videos", data={"prompt": "a cat"}, files=files), "image")
        assert service.ledger.counts().total == 0


def test_sizes_by_name_and_loras_for_one_of_two_transformers(tmp_path: Path) -> None:
    loras = tmp_path / "loras"
    loras.mkdir()
    (loras / "calm.safetensors").write_bytes(b"")
    with running(tmp_path / "served", lora_directory=loras) as (client, _, _):
        card = client.get("/v1/models").json()["data"][0]
        for lora in ("calm:loud", "calm:1:2", "calm:high:1", "calm:1:high:low"):
            refused(client.post("/v1/videos", json={"prompt": "a", "lora": lora}), "lora")
        for lora in ("calm", "calm:0.5", "calm:high", "calm:0.5:low", "calm:all", ["calm", "calm.safetensors:-1"]):
            answer = client.post("/v1/videos", json={"prompt": "a", "lora": lora})
            assert answer.status_code == 200, answer.text
        assert "480P" in refused(client.post("/v1/videos", json={"prompt": "a", "size": "8K"}), "size")
        assert card["id"] == "demo"


def test_one_model(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service, _):
        listed = client.get("/v1/models").json()["data"]
        assert client.get("/v1/models/demo").json() == listed[0]
        service.models["Wan-AI/Wan2.1"] = service.models["demo"]  # type: ignore[index]
        for path in ("/v1/models/Wan-AI/Wan2.1", "/v1/models/Wan-AI%2FWan2.1"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models/other", "/v1/models//etc/passwd", "/v1/models/..%2f"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_what_there_is_not(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        for method, path in (("POST", "/v1/videos/video_1/remix"), ("GET", "/v1/files"), ("GET", "/v1/videos/")):
            answer = client.request(method, path, follow_redirects=False)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert path in answer.json()["error"]["message"]
        answer = client.put("/v1/videos")
        assert answer.headers["Allow"] == "GET, HEAD, POST"
        assert "use GET, HEAD, POST" in answer.json()["error"]["message"]
