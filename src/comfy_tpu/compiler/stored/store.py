"""The program store: finds a program, or a fact that tracing found, by what decides it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from comfy_tpu.compiler.cache import CacheLookup, cache_limit, usable_cache, writable_cache
from comfy_tpu.compiler.stored.entries import FOLDER, Entries, is_cache_name, touch, trim_files
from comfy_tpu.compiler.stored.executable import StoredExecutable, describe_calls, first_line, read_cache_entry
from comfy_tpu.compiler.stored.identity import (
    NotDescribableError,
    describe,
    describe_mesh,
    describe_sharding,
    digest,
    environment,
    is_changed_since_start,
    software,
)
from comfy_tpu.config import CacheConfig
from comfy_tpu.errors import is_out_of_memory

logger = logging.getLogger(__name__)

STORE_VARIABLE = "COMFY_TPU_PROGRAM_STORE"


@dataclasses.dataclass(frozen=True)
class ProgramOrigin:
    """What is traced, and how, for programs that can be stored."""

    store: ProgramStore
    parts: Any
    """Data that decides every program of it, besides inputs and devices."""
    find_foreign_code: Callable[[], str] = str
    """Names code that was replaced at run time, after a trace; "" if there is none."""


@dataclasses.dataclass(frozen=True)
class ProgramStore:
    """Entries of the compile cache that need no tracing to be found."""

    directory: Path
    limit: int
    """Bytes of the whole cache."""
    writable: bool = True
    """False: entries are only read; none is written, marked as used or removed."""
    _files: dict[str, tuple[Path, ...]] = dataclasses.field(default_factory=dict, compare=False)
    """What the next process needs of each program that was loaded or made here, by its key."""

    @property
    def _entries(self) -> Entries:
        return Entries(self.directory / FOLDER, writable=self.writable)

    def fact(
        self,
        kind: str,
        decided_by: Any,
        make: Callable[[], Any],
        *,
        is_current: Callable[[Any], bool] = lambda fact: True,
        **about: Any,
    ) -> Any:
        """`make()`, which is JSON data, or what it was when the same things decided it. `about`: for lists."""
        try:
            key = f"{kind}-{digest(describe(decided_by), software())}"
        except NotDescribableError as error:
            logger.debug("%s is not stored: it depends on %s", kind, error)
            return make()
        entry = self._entries.read(key)
        if entry is not None and "fact" in entry and is_current(entry["fact"]):
            return entry["fact"]
        made = make()
        self._write(key, {"kind": kind, "about": about, "fact": made})
        return made

    def program_key(self, name: str, origin: Any, mesh: Any, inputs: Any, options: Mapping[str, Any]) -> str | None:
        """The key of a program; None where something that decides it cannot be described.

        `origin`: what is traced, and how. `inputs`: arrays, or their descriptions, and static values.
        """
        if jax.process_count() > 1:
            return None  # JAX's own cache knows how several processes share a program
        try:
            parts = (
                describe(origin),
                describe_mesh(mesh),
                _describe_inputs(inputs, mesh),
                describe(options),
                environment(),
            )
        except NotDescribableError as error:
            logger.debug("%s is not stored: it depends on %s", name, error)
            return None
        return f"{name}-{digest(*parts, software())}"

    def load_program(self, key: str, mesh: Any) -> StoredExecutable | None:
        """The program of a key; None if it is not here, or not as it was when it was stored."""
        entry = self._entries.read(key)
        if entry is None:
            return None
        if not (is_cache_name(entry.get("compiled")) and {"checksum", "program"} <= set(entry)):
            self._entries.remove(key)
            return None
        compiled = self.directory / entry["compiled"]
        try:
            content = compiled.read_bytes()
        except OSError:
            return None  # removed to keep the limit; JAX compiles it again
        try:
            serialized = read_cache_entry(content)
            if _checksum(serialized) != entry["checksum"]:
                raise ValueError("its content is not what was written")
            program = StoredExecutable(entry["program"], serialized, mesh)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._drop(key, compiled, error)
            return None
        if self.writable:
            touch(compiled)
        self._files[key] = (compiled, self._entries.path(key))
        return program

    def count_programs(self) -> tuple[int, int]:
        """How many programs were loaded or made here, and how many of them the next process finds."""
        return len(self._files), sum(all(path.is_file() for path in files) for files in self._files.values())

    def _drop(self, key: str, compiled: Path, error: Exception) -> None:
        """Removes an entry that cannot be used, and its executable, which JAX would load by its name alone."""
        logger.warning("compile cache: %s is damaged (%s); making it again", compiled.name, first_line(error))
        if self.writable:
            with contextlib.suppress(OSError):
                compiled.unlink(missing_ok=True)
            self._entries.remove(key)

    def save_program(self, key: str, compiled: jax.stages.Compiled, cache_key: str, mesh: Any, **about: Any) -> None:
        """Stores how a program is called, beside its entry in JAX's cache. `about`: for lists."""
        path = self.directory / f"{cache_key}-cache"
        self._files[key] = (path,)
        if not self.writable:
            return
        try:
            program = describe_calls(compiled, mesh)
            checksum = _checksum(read_cache_entry(path.read_bytes()))
        except (NotDescribableError, AttributeError, ImportError, OSError) as error:
            # AttributeError, ImportError: a JAX with other names. Its own cache still has the program.
            logger.info("%s is traced again in the next process (%s)", key, first_line(error))
            return
        self._files[key] = (path, self._entries.path(key))
        entry = {"kind": "program", "program": program, "compiled": path.name, "checksum": checksum, "about": about}
        self._write(key, entry)

    def _write(self, key: str, entry: Mapping[str, Any]) -> None:
        if not self.writable:
            return
        if is_changed_since_start():
            logger.info("%s is not stored: what it was made by has changed since this process began", key)
            return
        self._entries.write(key, entry)
        trim_files(self.directory, self.limit)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _describe_inputs(inputs: Any, mesh: Any) -> Any:
    arrays, static = inputs
    leaves, structure = jax.tree.flatten(arrays)
    described = [[list(leaf.shape), leaf.dtype.name, describe_sharding(leaf.sharding, mesh)] for leaf in leaves]
    values = [[name, type(value).__name__, describe(value)] for name, value in sorted(static.items())]
    return [str(structure), described, values]


def open_store(config: CacheConfig) -> ProgramStore | None:
    """The store inside the compile cache; None where there is no cache, and where COMFY_TPU_PROGRAM_STORE is 0.

    Code that is changed at run time is not seen by the store: whoever patches it switches the store off.
    """
    if os.environ.get(STORE_VARIABLE, "").strip() == "0":
        return None
    directory = usable_cache(config)
    if directory is None:
        return None
    limit, is_writable = cache_limit(config), writable_cache(config) is not None
    if is_writable:
        _trim_once(directory, limit)
    return ProgramStore(directory, limit, writable=is_writable)


@functools.cache
def _trim_once(directory: Path, limit: int) -> None:
    """Removes what is beyond a limit that was lowered since the last process wrote something."""
    trim_files(directory, limit)


@dataclasses.dataclass(frozen=True)
class ListedProgram:
    """A stored program, for people."""

    name: str
    device: str
    nbytes: int
    used: float
    """Seconds since the epoch."""


def list_programs(directory: Path) -> list[ListedProgram]:
    """The stored programs of a compile cache, the last used first; those whose executable is gone are left out."""
    found = []
    for info, entry in Entries(directory / FOLDER).all():
        compiled = directory / str(entry.get("compiled", ""))
        about = entry.get("about")
        if entry.get("kind") == "program" and isinstance(about, dict) and compiled.is_file():
            nbytes = info.nbytes + compiled.stat().st_size
            found.append(ListedProgram(str(about.get("name", "?")), str(about.get("device", "?")), nbytes, info.used))
    return sorted(found, key=lambda program: program.used, reverse=True)


def keep_limit(config: CacheConfig, lookup: CacheLookup, *, is_new: bool) -> None:
    """Marks the entry that JAX has just read or written as used; removes what a new one puts beyond the limit."""
    directory = writable_cache(config)
    if directory is not None and (path := lookup.entry(directory)) is not None:
        touch(path)
        if is_new:
            trim_files(directory, cache_limit(config))
        else:
            _trim_once(directory, cache_limit(config))
