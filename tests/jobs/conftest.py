"""Where a batch writes: the same tests run with a local directory, with memory:// and with a real S3 server (moto).

The server needs `pip install s3fs 'moto[s3,server]'`, which ask for older versions of other packages than
constraints.txt has.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

S3 = pytest.param("s3", marks=pytest.mark.slow)


class S3Server:
    """Keeps its buckets while it is stopped."""

    def __init__(self, moto: Any) -> None:
        self._moto = moto
        self._port = 0
        self.start()

    def start(self) -> None:
        self._running = self._moto.ThreadedMotoServer(port=self._port)
        self._running.start()
        self._port = self._running.get_host_and_port()[1]

    def stop(self) -> None:
        self._running.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    # Neither is needed by comfy-tpu itself: s3fs is for users of s3://, moto is the server of these tests.
    pytest.importorskip("s3fs", reason="s3fs is not installed; `make test-ray` installs it and runs these tests")
    moto = pytest.importorskip("moto.server", reason="moto is not installed; `make test-ray` installs it")
    server = S3Server(moto)
    yield server
    server.stop()


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a directory in a new bucket."""
    import s3fs

    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_server.url,
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{abs(hash(tmp_path))}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/videos"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["local", "memory", S3])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a batch's directory, which is not there yet. By `indirect`, of some of the stores only."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if request.param == "local":
        yield str(tmp_path / "out")
    elif request.param == "s3":
        yield request.getfixturevalue("bucket")
    else:
        yield f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
