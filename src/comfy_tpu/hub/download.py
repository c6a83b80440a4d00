"""Downloads a model: only the files it needs, each checked, and from where an earlier download ended.

huggingface_hub transfers the bytes. It begins a file anew after an interruption, and a shard of these models has five
gigabytes and more: large files are written to a partial file of our own, which a later download goes on with, and
handed to its cache, or to a directory, when they are whole.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.card import NOT_STATED, SCHEDULER_FILE, Config
from comfy_tpu.families.registry import find_model_card, find_published
from comfy_tpu.hub.disk import RESERVE_BYTES, find_disk, has_room
from comfy_tpu.hub.repository import Repository, hub_errors, open_repository
from comfy_tpu.hub.selection import INDEX, RemoteFile, select_files
from comfy_tpu.hub.sizes import format_bytes
from comfy_tpu.json_input import read_json

WORKERS = 4
ALLOWED_BYTES = 5 * 10**9
"""What a node downloads without being told to. Minutes, and no disk is full of it; a model can have 80 GB."""
ALLOW_VARIABLE = "COMFY_TPU_ALLOW_DOWNLOAD"
_PARTIAL = ".comfy-tpu.partial"
_READ_BYTES = 2**24
_ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The state of a download."""

    file: str
    """The file whose bytes came last."""
    done: int
    """Bytes of all files that are here, with those of earlier downloads."""
    total: int


TransferCallback = Callable[[Transfer], None]


class DownloadCancelledError(Exception):
    """Another file failed, or the user stopped the download."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the files of a model go: the hub's cache, or a directory of their own."""

    repository: Repository
    directory: Path | None = None

    @property
    def root(self) -> Path:
        """The directory on whose disk the files are."""
        if self.directory is not None:
            return self.directory
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"models--{self.repository.model.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The model directory."""
        if self.directory is not None:
            return self.directory
        return self.root / "snapshots" / self.repository.commit

    def path(self, file: RemoteFile) -> Path:
        return self.snapshot / file.name

    def partial(self, file: RemoteFile) -> Path:
        assert file.sha256 is not None
        if self.directory is None:
            return self.root / "blobs" / f"{file.sha256}{_PARTIAL}"
        return self.directory / ".cache" / "comfy-tpu" / f"{file.sha256}{_PARTIAL}"

    def has(self, file: RemoteFile) -> bool:
        with contextlib.suppress(OSError):
            return self.path(file).stat().st_size == file.size
        return False

    def bytes_here(self, file: RemoteFile) -> int:
        """Bytes of a file that need not come again."""
        if self.has(file):
            return file.size
        if file.sha256 is not None:
            with contextlib.suppress(OSError):
                return min(self.partial(file).stat().st_size, file.size)
        return 0


def download_model(
    model: str,
    *,
    directory: Path | None = None,
    revision: str | None = None,
    on_progress: TransferCallback = lambda transfer: None,
    is_cancelled: Callable[[], bool] = lambda: False,
    check: Check = lambda index, read: None,
    workers: int = WORKERS,
) -> Path:
    """Downloads what is missing, and returns the model directory. `directory`: instead of the hub's cache.

    Raises InvalidValueError where the disk has no room, CheckpointError for what the hub does not give, and
    UnsupportedError for a model of no known family, before its weights come. `check`: as in `find_needed`.
    """
    place = Place(open_repository(model, revision), directory)
    with _quiet_hub():
        needed = find_needed(place, check)
        check_space(place, needed)
        return _Download(place, needed, on_progress, is_cancelled).run(workers)


Check = Callable[[Config, Callable[[str], Config]], object]
"""(model_index.json, a function that reads a JSON file of the repository, empty where there is none)."""


def find_needed(place: Place, check: Check) -> list[RemoteFile]:
    """The files of a model that is known here. Its index is fetched, and the configurations that `check` reads, which
    raises an error for a model that cannot be used."""
    repository = place.repository
    index_file = repository.find(INDEX)
    if index_file is None:
        raise CheckpointError(
            f"model={repository.model} has no {INDEX}: it is no model in diffusers' layout; give the hub id of one",
            field="model",
        )

    @functools.cache
    def read(name: str) -> Config:
        file = repository.find(name)
        return {} if file is None else _read(_fetch_small(place, file))

    index = read(INDEX)
    find_model_card(index, read("transformer/config.json"), read(SCHEDULER_FILE))
    check(index, read)
    return select_files(repository.files, index, repository.model)


def check_space(place: Place, files: Sequence[RemoteFile]) -> None:
    """Raises InvalidValueError where the disk has no room for what is missing."""
    missing = sum(file.size - place.bytes_here(file) for file in files)
    disk = find_disk(place.root)
    if not has_room(disk.free_bytes, missing):
        where = (
            "set HF_HOME to a directory on a larger disk, or give one with --local-dir"
            if place.directory is None
            else "give a directory on a larger disk"
        )
        raise InvalidValueError(
            f"model={place.repository.model} needs {format_bytes(missing)} more in {place.root}, and its disk {disk} "
            f"has {format_bytes(disk.free_bytes)} free, of which {format_bytes(RESERVE_BYTES)} stay free; {where}",
            field="model",
        )


def check_allowed(model: str, *, field: str) -> None:
    """Raises InvalidValueError for a model of which more than ALLOWED_BYTES are missing here, unless ALLOW_VARIABLE is
    set. Without an answer from the hub, nothing can be downloaded, and nothing is refused. `field`: of the model."""
    if os.environ.get(ALLOW_VARIABLE, "").lower() in ("1", "true", "yes", "on"):
        return
    try:
        place = Place(open_repository(model))
        with _quiet_hub():
            missing = sum(file.size - place.bytes_here(file) for file in find_needed(place, lambda index, read: None))
    except CheckpointError:
        return
    if missing <= ALLOWED_BYTES:
        return
    published = find_published(model)
    licence = published[1].licences.get(published[0], NOT_STATED) if published else NOT_STATED
    raise InvalidValueError(
        f"{field}={model} needs a download of {format_bytes(missing)} to {place.root.parent} (licence: {licence}), and "
        f"more than {format_bytes(ALLOWED_BYTES)} are not downloaded unasked; run `comfy-tpu download {model}`, switch "
        f"on allow_download in TPU Options, or start ComfyUI with {ALLOW_VARIABLE}=1",
        field=field,
    )


class _Download:
    def __init__(
        self,
        place: Place,
        files: Sequence[RemoteFile],
        on_progress: TransferCallback,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._place, self._files = place, files
        self._on_progress, self._is_cancelled = on_progress, is_cancelled
        self._total = sum(file.size for file in files)
        self._done = 0
        self._lock = threading.Lock()
        self._has_failed = False

    def run(self, workers: int) -> Path:
        missing = [file for file in self._files if not self._place.has(file)]
        self._done = sum(file.size for file in self._files) - sum(file.size for file in missing)
        self._report("", 0)
        pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="download")
        try:
            running = [pool.submit(self._fetch, file) for file in missing]
            for future in concurrent.futures.as_completed(running):
                future.result()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return self._place.snapshot

    def _fetch(self, file: RemoteFile) -> None:
        self._check_cancelled()
        if file.sha256 is None:
            _fetch_small(self._place, file)
            self._report(file.name, file.size)
            return
        with _write_errors(self._place):
            self._fetch_large(file)

    def _fetch_large(self, file: RemoteFile) -> None:
        partial = self._place.partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        if partial.is_file() and partial.stat().st_size > file.size:
            partial.unlink()
        digest = self._digest_beginning(file, partial)
        with _PartialFile(
            partial, lambda count: self._report(file.name, count), digest, self._check_cancelled
        ) as opened:
            self._transfer(file, opened)
        if partial.stat().st_size != file.size:
            raise CheckpointError(
                f"model={self._place.repository.model}: {file.name} ended after {partial.stat().st_size} bytes, "
                f"expected {file.size}; start again: it goes on from there",
                field="model",
            )
        if opened.hexdigest(file.size) != file.sha256:
            partial.unlink()
            raise CheckpointError(
                f"model={self._place.repository.model}: {file.name} came damaged (its SHA-256 is another one); start "
                "again: it is downloaded anew",
                field="model",
            )
        self._hand_over(file, partial)

    def _digest_beginning(self, file: RemoteFile, partial: Path) -> Any:
        """The digest of the bytes that an earlier download left, which count as done from now on."""
        digest = hashlib.sha256()
        if partial.is_file():
            with partial.open("rb") as opened:
                while content := opened.read(_READ_BYTES):
                    self._check_cancelled()
                    digest.update(content)
                    self._report(file.name, len(content))
        return digest

    def _transfer(self, file: RemoteFile, opened: _PartialFile) -> None:
        """A signed address holds for an hour, and a connection may end: each attempt asks for an address anew, and the
        next one begins where it stopped."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        repository = self._place.repository
        url = hf_hub_url(repository.model, file.name, revision=repository.commit)
        for attempt in range(_ATTEMPTS):
            start = opened.tell()
            if start == file.size:
                return
            try:
                with hub_errors(repository.model):
                    location = get_hf_file_metadata(url).location
                    headers = build_hf_headers() if _host(location) == _host(url) else {}
                    http_get(location, opened, resume_size=start, headers=headers, expected_size=file.size)
                return
            except CheckpointError:
                if attempt + 1 == _ATTEMPTS:
                    raise
            except OSError as error:
                # huggingface_hub counts the bytes, too, and its sentence is advice for its own cache.
                if error.errno is not None or attempt + 1 == _ATTEMPTS:
                    if error.errno is not None:
                        raise
                    return

    def _hand_over(self, file: RemoteFile, partial: Path) -> None:
        if self._place.directory is not None:
            target = self._place.path(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.replace(target)
            return
        partial.replace(self._place.root / "blobs" / str(file.sha256))
        _fetch_small(self._place, file)  # the bytes are there, under the name that it looks for: it makes the link

    def _report(self, name: str, count: int) -> None:
        with self._lock:
            self._done += count
            self._on_progress(Transfer(name, self._done, self._total))

    def _check_cancelled(self) -> None:
        if self._has_failed or self._is_cancelled():
            raise DownloadCancelledError


class _PartialFile(io.FileIO):
    """A file that is appended to. Counts and digests what is written; a write raises when the download is cancelled."""

    def __init__(
        self, path: Path, on_bytes: Callable[[int], None], digest: Any, check_cancelled: Callable[[], None]
    ) -> None:
        super().__init__(path, "ab")
        self._path, self._on_bytes, self._digest, self._check_cancelled = path, on_bytes, digest, check_cancelled
        self._is_digested = True

    def write(self, content: Any) -> int:
        self._check_cancelled()
        rest = memoryview(content).cast("B")
        written = 0
        while rest:  # the system may take less than all
            count = super().write(rest) or 0
            self._digest.update(rest[:count])
            self._on_bytes(count)
            rest, written = rest[count:], written + count
        return written

    def truncate(self, size: int | None = None) -> int:
        """Called where a server answers with the whole file instead of the rest of it."""
        before = self._path.stat().st_size
        after = super().truncate(size)
        self._on_bytes(after - before)
        self._is_digested = False
        return after

    def hexdigest(self, size: int) -> str:
        if self._is_digested:
            return str(self._digest.hexdigest())
        with self._path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()


def _fetch_small(place: Place, file: RemoteFile) -> Path:
    from huggingface_hub import hf_hub_download

    repository = place.repository
    target: dict[str, Any] = {} if place.directory is None else {"local_dir": place.directory}
    with hub_errors(repository.model), _write_errors(place):
        path = Path(hf_hub_download(repository.model, file.name, revision=repository.commit, **target))
    if path.stat().st_size != file.size:
        raise CheckpointError(
            f"model={repository.model}: {file.name} has {path.stat().st_size} bytes, expected {file.size}; remove "
            f"{path}, and start again",
            field="model",
        )
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download the model again", field="model") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no object; download the model again", field="model")
    return content


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without huggingface_hub's own bars, of which there would be one for each file, and its lines about connections
    that it takes up again."""
    from huggingface_hub import utils

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    disabled: bool = utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logger.setLevel(level)
        if not disabled:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _write_errors(place: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        disk = find_disk(place.root)
        raise CheckpointError(
            f"{place.root} cannot be written ({os.strerror(error.errno)}); its disk {disk} has "
            f"{format_bytes(disk.free_bytes)} free: make room, or choose another with HF_HOME or --local-dir, and "
            "start again: what is there stays",
            field="model",
        ) from error


def _host(url: str) -> str:
    from urllib.parse import urlparse

    return urlparse(url).netloc
