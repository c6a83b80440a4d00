"""Clients do not learn where a server keeps its files."""

import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError
from comfy_tpu.serving.config import ServeConfig
from comfy_tpu.serving.hidden_paths import find_roots, hide_paths
from tests.serving.stand_in import running


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/srv/models/x.safetensors is damaged; download it again", "x.safetensors is damaged; download it again"),
        ("[Errno 2] No such file: '/srv/my models/a b.json'", "[Errno 2] No such file: 'a b.json'"),
        ("model=/srv/x: no weights (/home/ann/cache/y, /opt/z/)", "model=x: no weights (y, z)"),
        ("`/opt/venv/bin/python -m pip install '/srv/comfy-tpu[nnx]'`", "`python -m pip install 'comfy-tpu[nnx]'`"),
        ("model=/data/wan is here", "model=/data/wan is here"),
        ("Wan-AI/Wan2.1 does 3/4 of the frames/s; look at ./served/x", None),
        ("see https://huggingface.co/a/b or gs://bucket/a, then GET /v1/videos/x", None),
        ("look at file:///srv/models/x, file:/srv/models/y or file://host/srv/z", "look at x, y or z"),
        ("/v1/../srv/secret/x and /v1/videos/../../srv/y and /v1/secret/models/x.bin", "x and y and x.bin"),
        ("POST /v1/images/edits, GET /v1/models or /v1/stages/x/events.", None),
        ('[Errno 2] No such file: "/srv/ann\'s models/a b.json"', '[Errno 2] No such file: "a b.json"'),
        ("~/models/x and ~ann/models/y are missing", "x and y are missing"),
        ("/srv/a,b/x.bin, /srv/c,/srv/d", "x.bin, c,d"),
    ],
)
def test_paths_are_hidden(message: str, shown: str | None) -> None:
    assert hide_paths(message, ("/data/wan",)) == (message if shown is None else shown)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/srv/my models, old/x y.bin is damaged", "x y.bin is damaged"),
        ("nothing is in /srv/my models, old", "nothing is in my models, old"),
        ("file:///srv/my models, old/x.bin", "x.bin"),
        ("/srv/my models, older has 1 file", "my models, older has 1 file"),
        ("/data is full; /data/x.bin, /database", "data is full; x.bin, /database"),
        (
            "model=/srv/my wan is here, without /srv/my wan/vae/config.json",
            "model=/srv/my wan is here, without config.json",
        ),
    ],
)
def test_known_directories_are_hidden_whatever_their_names(message: str, shown: str) -> None:
    roots = frozenset(("/srv/my models, old", "/data", "/srv/my wan"))
    assert hide_paths(message, ("/srv/my wan",), roots) == shown


def test_the_directories_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/cache/hub")
    monkeypatch.chdir(tmp_path)
    config = ServeConfig(("a/hub-id", "/srv/wan"), Path("served"), lora_directory=Path("/srv/loras"))
    own = {str(tmp_path / "served"), "/srv/wan", "/srv/loras", "/cache/hub", "/home/ann", sys.prefix}
    assert find_roots(config) >= own
    assert not any("hub-id" in root for root in find_roots(config))


@pytest.mark.parametrize(("kind", "status"), [(InvalidValueError, 400), (CheckpointError, 503)])
def test_an_order_that_cannot_be_taken(
    kind: type[ComfyTpuError], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as (client, service, _):

        def refuse(*_: object) -> None:
            raise kind(f"{tmp_path}/inputs/x.png is no image")

        monkeypatch.setattr(service, "accept", refuse)
        answer = client.post("/v1/videos", json={"prompt": "a cat"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (status, "x.png is no image")
