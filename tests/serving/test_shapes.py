"""Which sizes a server takes, and how many new shapes a client may have compiled in an hour."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.flux2 import image as flux2
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.serving.config import Limits
from comfy_tpu.serving.served_model import open_served_model
from comfy_tpu.serving.shapes import NewShapes, NewShapesError, check_models, check_sizes, media_shape, parse_sizes
from tests.serving.stand_in import running
from tests.serving.test_api import KEYS, wait_for

SIZES = ((64, 64), (96, 64))


def test_sizes_as_they_are_written() -> None:
    assert parse_sizes("64x64, 96x64,64x64") == SIZES


@pytest.mark.parametrize("text", ["", "64", "64x64,", "0x64", "64x64x17", "64*64", "-64x64", "480p"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidValueError, match="is not WIDTHxHEIGHT; write 832x480,1280x720"):
        parse_sizes(text)


def test_sizes_that_the_models_do_not_take() -> None:
    models = {"demo": open_served_model("demo")}
    check_models((), models)
    check_models(SIZES, models)
    with pytest.raises(InvalidValueError, match="65x64 suits none of the models"):
        check_models((*SIZES, (65, 64)), models)


def test_a_second_pass_has_to_have_one_of_the_sizes_too() -> None:
    first, second = (GenerationSettings(width=width, height=64) for width in (64, 128))
    check_sizes(SIZES, [first])
    check_sizes((), [second])
    with pytest.raises(InvalidValueError, match="size=128x64 is not taken here; choose from 64x64, 96x64"):
        check_sizes(SIZES, [first, second])


def test_other_sizes_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(sizes=SIZES)) as (client, _, _):
        assert client.get("/v1/models").json()["data"][0]["sizes"] == ["64x64", "96x64"]
        refused = client.post("/v1/videos", json={"prompt": "a cat", "size": "128x64"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "size"
        for size in (None, "96x64"):  # the model's own, and another
            made = client.post("/v1/videos", json={"prompt": "a cat", "size": size}).json()
            wait_for(client, made["id"], "completed")


def test_a_request_without_a_size_where_the_models_own_is_not_taken(tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(sizes=((96, 64), (64, 96)))) as (client, _, _):
        for size in (None, "auto"):
            made = client.post("/v1/videos", json={"prompt": "a cat", "size": size})
            assert made.json()["size"] == "96x64"


@pytest.mark.parametrize("is_fitted", [True, False])
def test_reference_images_are_shapes_where_each_has_its_own_size(is_fitted: bool) -> None:
    media = SimpleNamespace(fit_reference=flux2.fit if is_fitted else None)
    model: Any = SimpleNamespace(files=SimpleNamespace(family=SimpleNamespace(media=media)))

    def shape(*sizes: tuple[int, int]) -> object:
        return media_shape(model, GivenMedia(tuple(Image.new("L", size) for size in sizes)))

    assert shape((512, 512)) == shape((517, 512))  # cropped
    assert (shape((512, 512)) == shape((528, 512))) is not is_fitted
    assert shape((512, 512)) != shape((512, 512), (512, 512))
    assert shape((512, 512)) != shape()


def test_new_shapes_of_an_hour() -> None:
    now = 0.0
    shapes = NewShapes(2, lambda: now)
    shapes.add("ann", ["a"])
    now = 600.0
    shapes.add("ann", ["a", "b"])
    with pytest.raises(NewShapesError, match="ordered 2 new shapes in the last hour, and 2 are the most") as caught:
        shapes.add("ann", ["c"])
    assert caught.value.retry_seconds == 3000
    shapes.add("ann", ["b"])
    shapes.add("bob", ["c"])
    shapes.add("ann", ["c"])  # compiled for bob
    now = 3600.0
    shapes.add("ann", ["d"])
    with pytest.raises(NewShapesError):
        shapes.add("ann", ["e"])


def test_a_client_with_a_key_orders_so_many_new_shapes(tmp_path: Path) -> None:
    with running(tmp_path, keys=KEYS, limits=Limits(new_shapes=1)) as (client, _, _):

        def order(name: str, **fields: object) -> int:
            headers = {"Authorization": f"Bearer {KEYS[name]}"}
            answer = client.post("/v1/videos", json={"prompt": "a cat", **fields}, headers=headers)
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "too_many_new_shapes"
                assert 0 < int(answer.headers["retry-after"]) <= 3600
            return int(answer.status_code)

        assert order("ann") == 200  # the shape of the server's first step
        assert order("ann", seed=3, steps=7) == 200
        assert order("ann", frames=9) == 200
        assert order("ann", size="96x64") == 429
        assert order("ann", frames=5) == 429
        assert order("bob", size="96x64") == 200
        assert order("ann", size="96x64") == 200


def test_without_keys_nobody_is_limited(tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(new_shapes=1)) as (client, _, _):
        for frames in (5, 9, 13):
            assert client.post("/v1/videos", json={"prompt": "a cat", "frames": frames}).status_code == 200
