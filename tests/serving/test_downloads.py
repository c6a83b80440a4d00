"""Files: whole, in parts, by HEAD, and gone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.stand_in import running
from tests.serving.test_api import create, wait_for


@pytest.fixture
def video(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """A client, and the address of a file with "a cat" in it."""
    with running(tmp_path) as (client, _, _):
        yield client, f"/v1/videos/{wait_for(client, create(client)['id'], 'completed')['id']}/content"


def test_parts(video: tuple[Any, str]) -> None:
    client, path = video
    whole = client.get(path)
    for given, status, content in (
        ("bytes=0-0", 206, b"a"),
        ("bytes=2-", 206, b"cat"),
        ("bytes=-3", 206, b"cat"),
        ("bytes=-99", 206, b"a cat"),
        ("bytes=0-99", 206, b"a cat"),
        ("BYTES=0-0", 206, b"a"),
        ("bytes=0-1,1-3", 206, b"a ca"),
        ("bytes=5-", 416, None),
        ("bytes=-0", 416, None),
        ("lines=0-1", 200, b"a cat"),
        ("bytes=3-1", 200, b"a cat"),
        ("bytes=a-b", 200, b"a cat"),
        ("bytes=", 200, b"a cat"),
        ("nonsense", 200, b"a cat"),
    ):
        answer = client.get(path, headers={"Range": given})
        assert answer.status_code == status, given
        if status == 416:
            assert answer.headers["Content-Range"] == "bytes */5"
            assert "behind the end" in answer.json()["error"]["message"]
        else:
            assert answer.content == content, given
    several = client.get(path, headers={"Range": "bytes=0-0,4-4"})
    assert several.headers["Content-Type"].startswith("multipart/byteranges")
    assert [b"bytes 0-0/5" in several.content, b"bytes 4-4/5" in several.content] == [True, True]
    for etag, status in ((whole.headers["ETag"], 206), ('"another"', 200), (f"W/{whole.headers['ETag']}", 200)):
        answer = client.get(path, headers={"Range": "bytes=0-0", "If-Range": etag})
        assert answer.status_code == status


def test_head(video: tuple[Any, str]) -> None:
    client, path = video
    for each in (path, "/", "/healthz", "/readyz", "/v1/models", "/v1/videos", path.removesuffix("/content")):
        head, got = client.head(each), client.get(each)
        assert (head.status_code, head.headers["Content-Length"]) == (200, got.headers["Content-Length"]), each
    assert client.head(path, headers={"Range": "bytes=0-1"}).status_code == 206
    assert client.head("/v1/videos/nothing").status_code == 404
    assert client.head(path.replace("/content", "/events")).status_code == 405  # it might not end


def test_a_file_that_is_deleted_meanwhile(video: tuple[Any, str], tmp_path: Path, monkeypatch: Any) -> None:
    client, path = video
    (file,) = tmp_path.glob("video_*")
    monkeypatch.setattr(Path, "is_file", lambda self: True)  # it was there a moment ago
    file.unlink()
    answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    monkeypatch.undo()
    assert client.get(path).status_code == 404


def test_what_is_not_made(video: tuple[Any, str]) -> None:
    client, path = video
    for variant in ("thumbnail", "spritesheet"):
        answer = client.get(path, params={"variant": variant})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "variant")
    assert client.get(path, params={"variant": "video"}).content == b"a cat"
    for index in (-1, 1, 2**70):
        answer = client.get(path, params={"index": index})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "index")
