"""The directory that a batch writes into: a local one, or an fsspec address such as gs://bucket/videos.

A file is either whole at its place or not there. In an object store an upload shows when it is complete; elsewhere a
file is uploaded beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import platformdirs

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.ledger import OutputFile
from comfy_tpu.jobs.output_names import OWN_DIRECTORY, RESULTS, check_output_name

logger = logging.getLogger(__name__)

_WHOLE_UPLOADS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"))
"""Protocols whose files appear when they are complete. In the others an upload shows while it is written."""
_TRIES = 5
PAUSE_SECONDS = 0.5
"""Before the second attempt to reach a store; then twice as long each time."""
_SAMPLE_BYTES = 2**20
_Result = TypeVar("_Result")


class Folder:
    """A batch's directory."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/") or "/"
        self.is_remote = "://" in address and not address.startswith("file://")
        self.local = None if self.is_remote else Path(address.removeprefix("file://"))

    @property
    def ledger_path(self) -> Path:
        """SQLite needs a disk. The ledger of a remote directory is in the user's state directory."""
        if self.local is not None:
            directory = self.local / OWN_DIRECTORY
        else:
            name = hashlib.sha256(self.address.encode()).hexdigest()[:24]
            directory = platformdirs.user_state_path("comfy-tpu") / "batches" / name
        return directory / "ledger.sqlite3"

    def prepare(self) -> None:
        """Makes the directory, and raises InvalidValueError where nothing can be written into it."""
        try:
            self.ledger_path.parent.mkdir(parents=True, exist_ok=True)
            if self.is_remote:
                probe = f"{OWN_DIRECTORY}/probe-{secrets.token_hex(4)}"
                with self._store_errors(f"output={self.address}/{probe} could not be uploaded"):
                    self._retry(lambda: self._system().pipe_file(self._place(probe), b"comfy-tpu"))
                    self._retry(lambda: self._system().rm_file(self._place(probe)))
        except (OSError, ComfyTpuError) as error:
            raise InvalidValueError(
                f"output={self.address} cannot be written ({error}); choose another directory", field="output"
            ) from error

    def names(self) -> set[str]:
        """The names of all files, below the directory."""
        if self.local is not None:
            found = (Path(place, name) for place, _, names in os.walk(self.local) for name in names)
            return {path.relative_to(self.local).as_posix() for path in found}
        root = self._root()
        try:
            listed = self._retry(lambda: self._system().find(root))
        except FileNotFoundError:
            return set()
        return {str(path).removeprefix(root).lstrip("/") for path in listed}

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """A local directory to write files into, which `place` then brings to their places."""
        if self.local is not None:
            yield self.local
            return
        with TemporaryDirectory(prefix="comfy-tpu-") as directory:
            yield Path(directory)

    def check_inside(self, directory: Path, name: str) -> str:
        """The path of a file in a directory of `writing`, whose own directory is made. Raises InvalidValueError where a
        link leads out of it."""
        path = directory / check_output_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(directory.resolve()):
            raise InvalidValueError(
                f"output={name} is outside the batch's directory, by a link; give a name inside it", field="output"
            )
        return f"{directory}/{name}"

    def place(self, directory: Path, names: Iterable[str]) -> list[OutputFile]:
        """Brings files of `writing`, which are at their places already in a local directory."""
        placed = []
        for name in names:
            path = directory / name
            placed.append(OutputFile(name, hash_file(path), path.stat().st_size))
            if self.is_remote:
                self.upload(path, name)
        return placed

    def receive(self, name: str, content: bytes) -> None:
        """Puts a file that another machine made at its place."""
        from comfy_tpu.pipeline import atomic

        assert self.local is not None
        path = Path(self.check_inside(self.local, name))
        with atomic.replacing(path) as partial, atomic.write_errors(path):
            partial.write_bytes(content)

    def write_results(self, results: Iterable[dict[str, Any]]) -> None:
        """Writes results.jsonl, a line for each job, as a whole."""
        from comfy_tpu.pipeline import atomic

        with self.writing() as directory:
            path = directory / RESULTS
            with (
                # Nobody chose the name, and a link of that name may lead anywhere.
                atomic.replacing(path, follows_links=False) as partial,
                atomic.write_errors(path),
                partial.open("w") as file,
            ):
                for result in results:
                    file.write(json.dumps(result, ensure_ascii=False) + "\n")
            if self.is_remote:
                self.upload(path, RESULTS)

    @contextlib.contextmanager
    def open_results(self) -> Iterator[Iterable[bytes]]:
        """The lines of results.jsonl; none if there is no such file."""
        if self.local is not None:
            path = self.local / RESULTS
            if not path.is_file():
                yield ()
                return
            with path.open("rb") as file:
                yield file
            return
        place = self._place(RESULTS)
        if not self._retry(lambda: self._system().exists(place)):
            yield ()
            return
        with self._system().open(place, "rb") as file:
            yield file

    def download(self, name: str, path: Path) -> bool:
        """Copies a file of a remote directory to a path, and returns whether there is one."""
        system, place = self._system(), self._place(name)
        with self._store_errors(f"{self.address}/{name} cannot be fetched"):
            if not self._retry(lambda: bool(system.exists(place))):
                return False
            self._retry(lambda: system.get_file(place, str(path)))
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Removes files of our own that may not be there. One that cannot be removed stays, with a warning."""
        for name in names:
            try:
                if self.local is not None:
                    (self.local / name).unlink(missing_ok=True)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        self._retry(lambda name=name: self._system().rm_file(self._place(name)))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - every store raises its own
                logger.warning("%s/%s was not removed (%s: %s)", self.address, name, type(error).__name__, error)

    def upload(self, path: Path, name: str) -> None:
        """Copies a file into a remote directory."""
        system, place = self._system(), self._place(name)
        with self._store_errors(f"output={self.address}/{name} could not be uploaded"):
            if _protocol(self.address) in _WHOLE_UPLOADS:
                self._retry(lambda: system.put_file(str(path), place))
                return
            directory = place.rpartition("/")[0]
            partial = f"{directory}/.comfy-tpu-{secrets.token_hex(8)}.partial"

            def upload() -> None:
                system.makedirs(directory, exist_ok=True)
                system.put_file(str(path), partial)
                system.mv(partial, place)

            try:
                self._retry(upload)
            except BaseException:
                with contextlib.suppress(Exception):  # the error before it says what happened
                    system.rm_file(partial)
                raise

    @contextlib.contextmanager
    def _store_errors(self, sentence: str) -> Iterator[None]:
        try:
            yield
        except ComfyTpuError:
            raise
        except Exception as error:  # every store raises its own
            raise ComfyTpuError(f"{sentence} ({type(error).__name__}: {error})", field="output") from error

    def _retry(self, action: Callable[[], _Result]) -> _Result:
        return retry(action, self.address)

    def _system(self) -> Any:
        return open_system(self.address)

    def _root(self) -> str:
        return str(self._system()._strip_protocol(self.address))

    def _place(self, name: str) -> str:
        return f"{self._root()}/{name}"


def fetch(address: str, directory: Path) -> Path:
    """An input file as a local path: itself, or a copy in `directory` of what an fsspec address names."""
    if "://" not in address:
        return Path(address)
    if address.startswith("file://"):
        return Path(address.removeprefix("file://"))
    # By its own name, which is part of what a video says of itself.
    target = directory / hashlib.sha256(address.encode()).hexdigest()[:24] / PurePosixPath(address).name
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
        try:
            system = open_system(address)
            retry(lambda: system.get_file(system._strip_protocol(address), str(partial)), address)
            partial.replace(target)
        except Exception as error:  # every store raises its own
            raise InvalidValueError(f"{address} cannot be fetched ({type(error).__name__}: {error})") from error
        finally:
            partial.unlink(missing_ok=True)
    return target


def open_system(address: str) -> Any:
    """The fsspec file system of an address."""
    import fsspec  # type: ignore[import-untyped]

    try:
        return fsspec.core.url_to_fs(address)[0]
    except (ImportError, ValueError) as error:
        raise InvalidValueError(f"{address} cannot be reached: {error}") from error


def retry(action: Callable[[], _Result], what: str) -> _Result:
    """Repeats an action that failed by the network, with growing pauses."""
    for attempt in range(1, _TRIES + 1):
        try:
            return action()
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, ComfyTpuError):
            raise  # these stay as they are
        except Exception as error:  # every store raises its own
            if attempt == _TRIES:
                raise
            pause = PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.0)
            logger.warning("%s: %s; trying again in %.1f s", what, error, pause)
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_fingerprint(address: str) -> str:
    """A text that changes when a file does, where it can be seen from here; else its name."""
    try:
        if "://" in address and not address.startswith("file://"):
            system = open_system(address)
            return str(system.ukey(system._strip_protocol(address)))
        path = Path(address.removeprefix("file://"))
        if path.is_dir():  # the frames of a video
            files = sorted(each for each in path.iterdir() if each.is_file())
            inside = [f"{each.name} {file_fingerprint(str(each))}" for each in files]
            return hashlib.sha256("\n".join(inside).encode("utf-8", "surrogateescape")).hexdigest()
        found = path.stat()
        return _sample_hash(path, found.st_size, found.st_mtime_ns)
    except Exception:  # noqa: BLE001 - a file on the workers' machines, perhaps; they say what is missing
        return address


@functools.lru_cache(maxsize=4096)
def _sample_hash(path: Path, size: int, modified: int) -> str:
    """A hash of the content, and of three samples of a large file's."""
    if size <= 16 * _SAMPLE_BYTES:
        return hash_file(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, size - _SAMPLE_BYTES):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _protocol(address: str) -> str:
    return address.partition("://")[0].split("::")[0]
