"""Single stages without a device: what is accepted, refused, shown and removed."""

import dataclasses
import functools
import json
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.stage_messages import pack, pack_settings
from comfy_tpu.serving.config import Limits
from tests.serving.stand_in import Served, running
from tests.serving.test_api import KEYS


@functools.cache
def demo() -> ModelFiles:
    return ModelFiles.open("demo")


def settings(**changed: Any) -> GenerationSettings:
    return dataclasses.replace(demo().defaults, **changed)


def metadata(**changed: str) -> dict[str, str]:
    return {
        "model": "demo",
        "model_fingerprint": demo().fingerprint,
        "settings": pack_settings(settings()),
        "prompt": "a red circle",
        **changed,
    }


def text(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = {name: torch.zeros(1, *shape) for name, shape in demo().embedding_shapes(settings()).items()}
    named = {f"{branch}.{name}": row for branch in ("positive", "negative") for name, row in rows.items()}
    return {**named, **changed}


def denoise(client: Any, tensors: Any = None, headers: Any = None, **changed: str) -> Any:
    content = pack(text() if tensors is None else tensors, metadata(**changed))
    return client.post("/v1/stages/denoise", content=content, headers=headers or {})


def follow(client: Any, id_: str) -> dict[str, Any]:
    events = client.get(f"/v1/stages/{id_}/events").text.strip().splitlines()
    return json.loads(events[-1].removeprefix("data: "))


def test_a_stage_from_input_to_removal(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service, _):
        made = denoise(client)
        assert made.status_code == 200, made.text
        stage = made.json()
        assert (stage["object"], stage["stage"], stage["model"]) == ("stage", "denoise", "demo")
        assert follow(client, stage["id"])["status"] == "completed"
        assert client.get(f"/v1/stages/{stage['id']}/content").status_code == 200
        assert list((tmp_path / "inputs").iterdir()) == []
        assert client.delete(f"/v1/stages/{stage['id']}").json()["deleted"] is True
        assert client.get(f"/v1/stages/{stage['id']}").status_code == 404
        assert service.ledger.counts().total == 0
        assert list(tmp_path.glob("stage_*")) == []


def test_what_a_server_says_of_its_models(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        (model,) = client.get("/v1/stages/models").json()["data"]
        assert (model["id"], model["fingerprint"], model["transformers"]) == ("demo", demo().fingerprint, 1)
        assert model["defaults"] == dataclasses.asdict(demo().defaults)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not safetensors"),
        (b"garbage", "not safetensors"),
        (pickle.dumps({"latents": [1.0]}), "not safetensors"),
        (struct.pack("<Q", 2**60) + b"{}", "not safetensors"),
        (struct.pack("<Q", 2) + b"[]", "metadata"),
        (struct.pack("<Q", 4) + b"nope", "not JSON"),
        (safetensors({"__metadata__": {"format": "1"}}), "format 1, expected 2"),
        (safetensors({"__metadata__": {"format": 2}}), "not texts by name"),
        (safetensors({"__metadata__": {"format": "2"}, **{str(n): {} for n in range(600)}}), "512 are the most"),
        (
            safetensors(
                {
                    "__metadata__": {"format": "2"},
                    "x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
                }
            ),
            "cannot be read as safetensors",
        ),
    ],
)
def test_bodies_that_are_no_stages(content: bytes, reason: str, tmp_path: Path) -> None:
    with running(tmp_path) as (client, service, _):
        answer = client.post("/v1/stages/denoise", content=content)
        assert (answer.status_code, reason in answer.text) == (400, True), answer.text
        assert service.ledger.counts().total == 0
        assert list((tmp_path / "inputs").iterdir()) == []


ODD = torch.full((1, 512, 128), float("nan"))
LATENTS = torch.zeros(1, 16, 1, 8, 8)


@pytest.mark.parametrize(
    ("tensors", "changed", "reason"),
    [
        ({"positive.text": ODD}, {}, "NaN or infinity"),
        ({"positive.text": torch.zeros(1, 512, 64)}, {}, "features"),
        ({"positive.text": torch.zeros(2, 512, 128)}, {}, "no embedding"),
        ({"positive.text": torch.zeros(1, 512, 128, dtype=torch.int64)}, {}, "expected floats"),
        ({"positive.text": torch.zeros(1, 512, 128, dtype=torch.uint8)}, {}, "no embedding"),
        ({"positive.text": torch.zeros(1, 256, 128)}, {}, "same size"),
        ({"positive@1.text": torch.zeros(1, 512, 128)}, {}, "ranges"),
        ({"positive@7.text": torch.zeros(1, 512, 128)}, {"ranges": '{"positive": [[0, 1]]}'}, "ranges"),
        ({"../../x": torch.zeros(1, 2)}, {}, "no embedding"),
        ({"shared.image": torch.zeros(1, 2)}, {}, "another model"),
        ({"shared.initial": LATENTS, "shared.strength": torch.tensor([[0.5]])}, {}, "made for other sizes"),
        ({"shared.initial": LATENTS, "shared.strength": torch.tensor([[2.0]])}, {}, "strength=2.0 is not"),
        ({"shared.initial": LATENTS}, {}, "embeddings to start from have no strength"),
        ({}, {"model": "/etc/passwd"}, "not served here"),
        ({}, {"model": ""}, "model is missing"),
        ({}, {"model_fingerprint": "other"}, "another one here"),
        ({}, {"mesh": "tp=8"}, "mesh is no field"),
        ({}, {"settings": "{}"}, "settings differ"),
        ({}, {"settings": "nope"}, "not JSON"),
        ({}, {"settings": pack_settings(GenerationSettings(num_inference_steps=10**9))}, "num_inference_steps"),
        ({}, {"settings": pack_settings(GenerationSettings(num_inference_steps=2, height=7))}, "height"),
        ({}, {"lora": '[{"name": "x", "strength": 1, "noise": "all", "sha256": ""}]'}, "not offered here"),
        ({}, {"lora": '{"name": "x"}'}, "no list"),
        ({}, {"preset": "9step"}, "preset=9step is unknown for model demo; choose from 4step"),
        ({}, {"ranges": "[1]"}, "ranges"),
        ({}, {"ranges": '{"positive": [[0, 2]]}'}, "ranges"),
    ],
)
def test_inputs_that_the_model_cannot_read(
    tensors: dict[str, torch.Tensor], changed: dict[str, str], reason: str, shared: Served
) -> None:
    client, service = shared
    answer = denoise(client, text(**tensors), **changed)
    assert (answer.status_code, reason in answer.json()["error"]["message"]) == (400, True), answer.text
    assert service.ledger.counts().total == 0
    assert list(service.inputs.iterdir()) == []


def test_a_stage_has_no_auto_to_choose_as_its_preset(shared: Served) -> None:
    """The client finds it out from the LoRAs, and names the preset."""
    answer = denoise(shared[0], text(), preset="auto")
    sentence = "preset=auto is unknown for model demo; choose from 4step"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, sentence)


@pytest.mark.parametrize(
    ("stage", "tensors", "status"),
    [
        ("encode", {}, 200),
        ("encode", {"image.0": torch.zeros(8, 8, 3, dtype=torch.uint8)}, 400),  # the model takes none
        ("encode", {"image.1": torch.zeros(8, 8, 3, dtype=torch.uint8)}, 400),
        ("encode", {"video.video": torch.zeros(17, 8, 8, 3, dtype=torch.uint8)}, 200),
        ("encode", {"video.video": torch.zeros(5, 8, 8, 3, dtype=torch.uint8)}, 400),  # too short
        ("encode", {"video.mask": torch.zeros(17, 8, 8, 3, dtype=torch.uint8)}, 400),  # the model takes none
        ("encode", {"video.else": torch.zeros(17, 8, 8, 3, dtype=torch.uint8)}, 400),
        ("encode", {"reference.0": torch.zeros(8, 8, 3, dtype=torch.uint8)}, 400),
        ("decode", {"latents": torch.zeros(1, 16, 2, 8, 8)}, 400),
        ("decode", {}, 400),
        ("train", {}, 404),
        ("models", {}, 404),
    ],
)
def test_stages_and_their_tensors(stage: str, tensors: dict[str, torch.Tensor], status: int, tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        answer = client.post(f"/v1/stages/{stage}", content=pack(tensors, metadata()))
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [({}, "neither a prompt nor an image"), ({"image.0": torch.zeros(99, 99, 3, dtype=torch.uint8)}, "9000 pixels")],
)
def test_encoding_nothing_or_too_much(tensors: dict[str, torch.Tensor], reason: str, tmp_path: Path) -> None:
    described = metadata()
    del described["prompt"]
    with running(tmp_path, limits=Limits(image_pixels=9000)) as (client, _, _):
        answer = client.post("/v1/stages/encode", content=pack(tensors, described))
        assert (answer.status_code, reason in answer.text) == (400, True), answer.text


def test_large_bodies_have_a_limit_of_their_own(tmp_path: Path) -> None:
    with running(tmp_path, limits=Limits(body_bytes=1000)) as (client, _, _):
        assert denoise(client).status_code == 200
    with running(tmp_path, limits=Limits(stage_bytes=1000)) as (client, _, _):
        assert denoise(client).status_code == 413
        parts = (b"x" * 100 for _ in range(20))  # of no announced length
        assert client.post("/v1/stages/denoise", content=parts).status_code == 413
        assert list((tmp_path / "inputs").iterdir()) == []


def test_inputs_of_no_job_are_removed_when_they_are_old(tmp_path: Path) -> None:
    with running(tmp_path) as (_, service, _):
        old, new = (tmp_path / "inputs" / f"stage_{digit * 24}-input" for digit in "01")
        for path in (old, new):
            path.write_bytes(b"half of it")
        os.utime(old, (0, 0))
        service.enforce_retention()
        assert list((tmp_path / "inputs").iterdir()) == [new]


def test_a_model_that_begins_with_an_image_is_warmed_up_with_one(tmp_path: Path) -> None:
    with running(tmp_path, "demo-image") as (_, _, executor):
        deadline = time.monotonic() + 10
        while not executor.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        (path,) = executor.requests[0].values["image"]
        assert Path(path).read_bytes()[:4] == b"\x89PNG"


def test_clients_see_their_own_stages_only(tmp_path: Path) -> None:
    with running(tmp_path, keys=KEYS) as (client, _, _):
        ann, bob = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
        assert denoise(client).status_code == 401
        assert denoise(client, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/v1/stages/models").status_code == 401
        id_ = denoise(client, headers=ann).json()["id"]
        for method, path in (
            *(("get", ""), ("delete", ""), ("get", "/content"), ("get", "/preview")),
            *(("get", "/events"), ("post", "/cancel")),
        ):
            assert client.request(method, f"/v1/stages/{id_}{path}", headers=bob).status_code == 404, path
        assert client.get(f"/v1/videos/{id_}", headers=ann).status_code == 404


def test_an_input_with_a_key_is_one_job(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service, _):
        headers, content = {"Idempotency-Key": "k"}, pack(text(), metadata())
        first, second = (client.post("/v1/stages/denoise", content=content, headers=headers).json() for _ in range(2))
        assert first["id"] == second["id"]
        assert service.ledger.counts().total == 1
        assert denoise(client, headers=headers, prompt="another").status_code == 409


def test_loras_are_those_of_the_server_with_the_clients_content(tmp_path: Path) -> None:
    loras = tmp_path / "loras"
    loras.mkdir()
    (loras / "a.safetensors").write_bytes(b"content")
    good = {"name": "a.safetensors", "strength": 0.5, "noise": "all"}
    digest = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    with running(tmp_path / "served", lora_directory=loras) as (client, service, _):
        for each, reason in (
            ({**good, "sha256": "0" * 64}, "another file"),
            ({**good, "sha256": digest, "name": "../a"}, "unknown here"),
            ({**good, "sha256": digest, "strength": "1:high"}, "no number"),
            ({**good, "sha256": digest, "noise": "some"}, "no list"),
        ):
            answer = denoise(client, lora=json.dumps([each]))
            assert (answer.status_code, reason in answer.text) == (400, True), answer.text
        made = denoise(client, lora=json.dumps([{**good, "sha256": digest, "noise": "low"}]))
        record = service.ledger.find(made.json()["id"])
        assert record is not None
        assert record.request.values["lora"] == [f"{loras / 'a.safetensors'}:0.5:low"]


def test_a_preset_goes_to_the_worker_and_is_described_for_clients(tmp_path: Path) -> None:
    with running(tmp_path) as (client, service, _):
        (model,) = client.get("/v1/stages/models").json()["data"]
        assert model["presets"]["4step"]["lora"] == "lora/4step.safetensors"
        assert model["presets"]["4step"]["settings"]["num_inference_steps"] == 4
        record = service.ledger.find(denoise(client, preset="4step").json()["id"])
        assert record is not None
        assert record.request.values["preset"] == "4step"
