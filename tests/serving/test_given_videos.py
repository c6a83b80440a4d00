"""Videos in a form: which are taken, what a request has of them, and the limits."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from comfy_tpu.serving.config import Limits
from tests.families import small_vace
from tests.pipeline.clips import picture, write_video
from tests.serving.stand_in import running
from tests.serving.test_api import png, wait_for

Make = Callable[[Path], bytes]


def clip(directory: Path, count: int = 20, **options: object) -> bytes:
    return write_video(directory / "given.mp4", range(0, 40 * count, 40), **options).read_bytes()  # type: ignore[arg-type]


def song(directory: Path) -> bytes:
    return write_video(directory / "given.mp4", [], sound=True).read_bytes()


def animation(directory: Path) -> bytes:
    content = io.BytesIO()
    Image.new("L", (8, 8)).save(content, "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 255)])
    return content.getvalue()


def test_a_video_to_start_from(tmp_path: Path) -> None:
    content = clip(tmp_path)
    with running(tmp_path / "server") as (client, service, executor):
        form = {"prompt": "wait", "fps": "25", "strength": "0.7"}
        answer = client.post("/v1/videos", data=form, files={"input_video": ("x.mp4", content)})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["has_video"], answer.json()["has_image"]) == (True, False)
        (record,) = service.ledger.list_jobs(None, "video", limit=9)
        values = record.request.values
        (path,) = values["video"]
        assert Path(path).read_bytes() == content
        assert (values["strength"], values["num_frames"]) == (0.7, 17), "twenty frames, rounded down to 4n+1"
        executor.may_go_on.set()
        wait_for(client, record.id, "completed")
        service.remove(record)
        assert list(service.inputs.iterdir()) == [], "neither the file nor what was received"


def test_what_is_given_to_vace(tmp_path: Path) -> None:
    content, model = clip(tmp_path), str(small_vace.directory())
    with running(tmp_path / "server", model) as (client, service, _):
        files = [
            ("input_video", ("x.mp4", content)),
            ("input_mask", ("x.png", png(64, 48))),
            ("input_reference", ("a.png", png(8, 8))),
            ("input_reference", ("b.png", png(9, 9))),
        ]
        form = {"prompt": "a cat", "fps": "25", "control_strength": "0.5,0.8", "size": "64x48"}
        answer = client.post("/v1/videos", data=form, files=files)
        assert answer.status_code == 200, answer.text
        (record,) = service.ledger.list_jobs(None, "video", limit=9)
        values = record.request.values
        assert [len(values[name]) for name in ("video", "mask", "reference")] == [1, 1, 2]
        assert (values["control_strength"], "image" in values) == ("0.5,0.8", False)
        described = client.get("/v1/models").json()["data"][0]
        assert (described["takes_videos"], described["needs_videos"]) == (["input_video", "input_mask"], [])


@pytest.mark.parametrize(
    ("make", "form", "reason"),
    [
        (song, {}, "input_video holds sound only; give a file with moving pictures"),
        (lambda directory: b"no video", {}, "input_video cannot be read as a video"),
        (animation, {}, "input_video is an animation; give a video such as an MP4"),
        (clip, {"num_frames": "41"}, "input_video has 20 frames at 25 a second, and num_frames=41 are to be made"),
        (clip, {"strength": "7"}, "strength=7 is not a number over 0, up to 1"),
        (clip, {"control_strength": "1"}, "control_strength is given, but model demo reads no control"),
        (
            lambda directory: clip(directory, size=(256, 256)),
            {},
            "input_video has pictures of 256×256 pixels, and 9999",
        ),
        (lambda directory: clip(directory, 40), {}, "input_video has 40 pictures, and 30 are the most"),
        (
            lambda directory: write_video(directory / "x.mp4", [0, 40, 9000]).read_bytes(),
            {},
            "input_video takes 9 seconds, and 5 are the most",
        ),
    ],
)
def test_videos_that_are_refused(make: Make, form: dict[str, str], reason: str, tmp_path: Path) -> None:
    limits = Limits(image_pixels=9999, video_frames=30, video_seconds=5)
    with running(tmp_path / "server", limits=limits) as (client, service, _):
        data = {"prompt": "x", "fps": "25", **form}
        answer = client.post("/v1/videos", data=data, files={"input_video": ("x.mp4", make(tmp_path))})
        message = answer.json()["error"]["message"]
        assert (answer.status_code, message[: len(reason)]) == (400, reason)
        assert str(tmp_path) not in message, "where it lies is nobody's business"
        assert service.ledger.counts().total == 0
        assert list(service.inputs.iterdir()) == []


def test_a_mask_alone_and_a_video_that_no_model_takes(tmp_path: Path) -> None:
    content = clip(tmp_path)
    for name, reason in (
        ("input_mask", "input_mask is given, but model demo takes video"),
        ("input_else", "no file of"),
    ):
        with running(tmp_path / name) as (client, _, _):
            answer = client.post("/v1/videos", data={"prompt": "x"}, files={name: ("x.mp4", content)})
            assert (answer.status_code, reason in answer.json()["error"]["message"]) == (400, True), answer.text
    with running(tmp_path / "json") as (client, _, _):
        answer = client.post("/v1/videos", json={"prompt": "x", "input_video": "http://example.com/x.mp4"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_video")


def test_bodies_with_videos_have_a_limit_of_their_own(tmp_path: Path) -> None:
    content, limits = clip(tmp_path), Limits(body_bytes=1000)
    assert len(content) > 1000
    files = {"input_video": ("x.mp4", content)}
    for given, status in ((limits, 200), (dataclasses.replace(limits, video_body_bytes=1000), 413)):
        with running(tmp_path / str(status), limits=given) as (client, _, _):
            assert client.post("/v1/videos", data={"prompt": "x", "fps": "25"}, files=files).status_code == status


def test_the_same_key_with_another_video_is_another_request(tmp_path: Path) -> None:
    first, other = clip(tmp_path), clip(tmp_path, first=1)
    assert first != other
    with running(tmp_path / "server") as (client, service, executor):
        headers = {"Idempotency-Key": "once"}
        for content, status in ((first, 200), (first, 200), (other, 409)):
            files = {"input_video": ("x.mp4", content)}
            answer = client.post("/v1/videos", data={"prompt": "wait", "fps": "25"}, files=files, headers=headers)
            assert answer.status_code == status
        assert service.ledger.counts().total == 1
        assert len(list(service.inputs.iterdir())) == 1
        executor.may_go_on.set()


def test_a_picture_may_be_a_mask(tmp_path: Path) -> None:
    picture(3).save(tmp_path / "x.png")
    with running(tmp_path / "server", str(small_vace.directory())) as (client, _, _):
        files = {"input_mask": ("x.png", (tmp_path / "x.png").read_bytes())}
        answer = client.post("/v1/videos", data={"prompt": "x", "fps": "25"}, files=files)
        assert "input_mask is given without video" in answer.json()["error"]["message"]
        files["input_video"] = ("x.mp4", clip(tmp_path))
        assert client.post("/v1/videos", data={"prompt": "x", "fps": "25"}, files=files).status_code == 200
