"""Directories that are no disk: uploads are whole or not there, and a lost connection is tried again."""

import json
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs import folder as folders
from comfy_tpu.jobs.folder import Folder, fetch
from comfy_tpu.jobs.ledger import Counts
from comfy_tpu.jobs.output_names import RESULTS
from tests.jobs.conftest import S3, S3Server
from tests.jobs.stand_in import content
from tests.jobs.test_driver import files, results, run

REMOTE = pytest.mark.parametrize("address", ["memory", S3], indirect=True)


class Flaky:
    """A file system whose first uploads fail, of those that show while they are written after a part of the file."""

    def __init__(self, system: Any, failures: list[str]) -> None:
        self._system = system
        self._failures = failures

    def put_file(self, local: str, remote: str) -> Any:
        if not self._failures:
            return self._system.put_file(local, remote)
        if self._system.protocol == "memory":
            self._system.pipe_file(remote, Path(local).read_bytes()[:5])
        raise ConnectionError(self._failures.pop())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors of the next uploads, the last one first."""
    monkeypatch.setattr(folders, "PAUSE_SECONDS", 0.0)
    system, coming = folders.open_system, list[str]()
    monkeypatch.setattr(folders, "open_system", lambda address: Flaky(system(address), coming))
    return coming


@REMOTE
def test_a_lost_connection_is_tried_again(address: str, failures: list[str]) -> None:
    failures += ["the connection was lost", "the server is busy"]
    workers, _, counts = run(address, "a cat")
    assert (workers.ran, counts, failures) == (["a cat"], Counts(done=1), [])
    assert list(files(address).values()) == [content("a cat")]


@REMOTE
def test_what_could_not_be_uploaded_is_not_seen(address: str, failures: list[str]) -> None:
    """Neither at its place nor beside it. The other jobs are done, and the next attempt succeeds."""
    failures += ["the connection was lost"] * 5
    workers, _, counts = run(address, "a cat", "a dog")
    assert (workers.ran, counts) == (["a cat", "a dog", "a cat"], Counts(done=2))
    assert sorted(files(address).values()) == sorted([content("a cat"), content("a dog")])


@REMOTE
def test_a_store_that_is_lost_for_good(address: str, failures: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels of a video")
    failures += ["the connection was lost"] * 5
    with pytest.raises(
        ComfyTpuError, match=r"^output=.*a\.png could not be uploaded \(ConnectionError: the connection"
    ):
        Folder(address).place(tmp_path, ["a.png"])
    assert Folder(address).names() == set()


@REMOTE
def test_inputs_are_fetched(address: str, tmp_path: Path) -> None:
    system, root = fsspec.core.url_to_fs(address)
    system.pipe_file(f"{root}/in/first.png", b"pixels")
    assert fetch(f"{address}/in/first.png", tmp_path).read_bytes() == b"pixels"


@REMOTE
def test_results_are_json_lines(address: str) -> None:
    run(address, "ein Kätzchen 猫")
    system, root = fsspec.core.url_to_fs(address)
    lines = system.cat_file(f"{root}/{RESULTS}").splitlines()
    assert json.loads(lines[0])["request"]["prompt"] == "ein Kätzchen 猫"


@pytest.mark.parametrize("address", [S3], indirect=True)
def test_a_server_that_is_away_for_a_while(address: str, s3_server: S3Server) -> None:
    run(address, "a cat")
    s3_server.stop()
    timer = threading.Timer(3.0, s3_server.start)
    timer.start()
    assert run(address, "a cat", "a dog")[0].ran == ["a dog"]
    timer.join()
    assert [each["state"] for each in results(address)] == ["done", "done"]


@pytest.mark.parametrize("address", [S3], indirect=True)
def test_parts_of_a_large_file_are_not_seen(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first part of a multipart upload, the connection is gone."""
    import s3fs

    monkeypatch.setattr(folders, "_TRIES", 1)
    calls: list[str] = []
    call = s3fs.S3FileSystem._call_s3

    async def lose(self: Any, method: str, *given: Any, **options: Any) -> Any:
        calls.append(method)
        if method == "upload_part" and calls.count("upload_part") > 1:
            raise ConnectionError("the connection was lost")
        return await call(self, method, *given, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", lose)
    (tmp_path / "large.mp4").write_bytes(bytes(150 * 2**20))
    with pytest.raises(ComfyTpuError, match="could not be uploaded"):
        Folder(address).place(tmp_path, ["large.mp4"])
    assert "upload_part" in calls
    assert Folder(address).names() == set()
