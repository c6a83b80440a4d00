"""A batch into a real S3 server on this machine (moto). Needs `pip install s3fs 'moto[s3,server]'`, which ask for older
versions of other packages than constraints.txt has."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs import folder as folders
from comfy_tpu.jobs.folder import Folder, fetch
from comfy_tpu.jobs.ledger import Counts
from comfy_tpu.jobs.output_names import RESULTS
from tests.jobs.stand_in import content
from tests.jobs.test_driver import files, results, run

s3fs = pytest.importorskip("s3fs", reason="s3fs needs an older python-dateutil than constraints.txt has")
moto = pytest.importorskip("moto.server", reason="the S3 server of these tests: pip install 'moto[s3,server]'")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = moto.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{abs(hash(tmp_path))}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/videos"
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_batch_goes_on_where_it_was(bucket: str) -> None:
    assert run(bucket, "a cat", "a dog")[2] == Counts(done=2)
    assert sorted(files(bucket).values()) == sorted([content("a cat"), content("a dog")])
    assert run(bucket, "a cat", "a dog", "a bird")[0].ran == ["a bird"]
    assert [each["state"] for each in results(bucket)] == ["done"] * 3


def test_another_machine_goes_on(bucket: str) -> None:
    run(bucket, "a cat", "a dog")
    Folder(bucket).ledger_path.unlink()
    workers, _, counts = run(bucket, "a cat", "a dog", "a bird")
    assert (workers.ran, counts) == (["a bird"], Counts(done=3))


class Flaky:
    """A file system whose first uploads fail."""

    def __init__(self, system: Any, failures: list[str]) -> None:
        self._system = system
        self._failures = failures

    def put_file(self, local: str, remote: str) -> Any:
        if self._failures:
            raise ConnectionError(self._failures.pop())
        return self._system.put_file(local, remote)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)


def test_a_lost_connection_is_tried_again(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PAUSE_SECONDS", 0.0)
    failures = ["the connection was lost", "the server is busy"]
    system = folders.open_system
    monkeypatch.setattr(folders, "open_system", lambda address: Flaky(system(address), failures))
    assert run(bucket, "a cat")[2] == Counts(done=1)
    assert not failures
    assert list(files(bucket).values()) == [content("a cat")]


def test_what_could_not_be_uploaded_is_not_seen(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file goes up in parts. After the first, the connection is gone."""
    monkeypatch.setattr(folders, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(folders, "_TRIES", 1)
    calls: list[str] = []
    call = s3fs.S3FileSystem._call_s3

    async def lose(self: Any, method: str, *given: Any, **options: Any) -> Any:
        calls.append(method)
        if method == "upload_part" and calls.count("upload_part") > 1:
            raise ConnectionError("the connection was lost")
        return await call(self, method, *given, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", lose)
    large = tmp_path / "large.mp4"
    large.write_bytes(bytes(150 * 2**20))
    with pytest.raises(ComfyTpuError, match="could not be uploaded"):
        Folder(bucket).place(tmp_path, ["large.mp4"])
    assert "upload_part" in calls
    assert "large.mp4" not in Folder(bucket).names()


def test_inputs_are_fetched(bucket: str, tmp_path: Path) -> None:
    s3fs.S3FileSystem().pipe_file(f"{bucket}/in/first.png", b"pixels")
    assert fetch(f"{bucket}/in/first.png", tmp_path).read_bytes() == b"pixels"


def test_results_are_json_lines(bucket: str) -> None:
    run(bucket, "ein Kätzchen 猫")
    lines = s3fs.S3FileSystem().cat_file(f"{bucket}/{RESULTS}").splitlines()
    assert json.loads(lines[0])["request"]["prompt"] == "ein Kätzchen 猫"
