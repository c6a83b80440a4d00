"""The persistent compile cache, and a count of what was really compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import logging
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import platformdirs

from comfy_tpu.config import CacheConfig
from comfy_tpu.quiet import on_warning

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "COMFY_TPU_CACHE_LIMIT"
_LIMIT_BYTES = 20 * 1000**3
"""The programs of some hundred sizes of a large model."""


def cache_directory(config: CacheConfig) -> Path:
    """The directory of the compile cache, which need not exist yet."""
    if config.directory is not None:
        return config.directory
    if from_environment := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(from_environment)
    return platformdirs.user_cache_path("comfy-tpu") / "xla"


def cache_limit(config: CacheConfig) -> int:
    """Bytes that the compile cache may take: chosen, from the environment, or the default."""
    if config.limit_bytes is not None:
        return config.limit_bytes
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not given:
        return _LIMIT_BYTES
    try:
        return parse_limit(given)
    except (ValueError, OverflowError):
        _warn_of_limit(given)
        return _LIMIT_BYTES


@functools.cache  # one warning for each text
def _warn_of_limit(text: str) -> None:
    logger.warning("%s=%s is no size; give one such as 20GB, which is the limit now", LIMIT_VARIABLE, text[:40])


def parse_limit(text: str) -> int:
    """Bytes of a size such as "20GB" or "500 MB"; ValueError or OverflowError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2] or " "))


def usable_cache(config: CacheConfig) -> Path | None:
    """The directory of the compile cache, made if need be; None where it is off, or can neither be written nor read.

    A directory that cannot be written is warned of.
    """
    directory = cache_directory(config)
    return directory if config.enabled and _find_access(directory) != "none" else None


def writable_cache(config: CacheConfig) -> Path | None:
    """`usable_cache`, but None where it can only be read."""
    directory = usable_cache(config)
    return directory if directory is not None and _find_access(directory) == "write" else None


def enable_cache(config: CacheConfig) -> Path | None:
    """Turns JAX's persistent cache on for this process; None, with a warning, if the directory cannot be used.

    From a directory that cannot be written, with a warning too, programs are only read.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    directory = usable_cache(config)
    text = None if directory is None else str(directory)
    if jax.config.values["jax_compilation_cache_dir"] != text:
        jax.config.update("jax_compilation_cache_dir", text)
        compilation_cache.reset_cache()  # JAX opens its cache once, possibly before this call
    # Small programs count too: a second process must compile nothing at all. JAX warns of each write that fails, so it
    # is not to write where it cannot.
    shortest = math.inf if directory is not None and _find_access(directory) == "read" else 0.0
    jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _remove_paths_from_keys()
    _handle_cache_warnings()
    return directory


_PACKAGE_PARENT = r".*[\\/](?=comfy_tpu[\\/])"


def _remove_paths_from_keys() -> None:
    """Keeps paths out of the keys of entries, so that a cache can be copied, or read by another installation.

    A key is a hash of the program and its options. On every platform JAX puts a directory for XLA's GPU autotuning,
    inside the cache, into the options. A Pallas kernel is part of the program as bytes, with its source file names.
    """
    import jax

    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if jax.config.values["jax_hlo_source_file_canonicalization_regex"] is None:
        jax.config.update("jax_hlo_source_file_canonicalization_regex", _PACKAGE_PARENT)


@functools.cache  # one answer, and one warning, per directory
def _find_access(directory: Path) -> Literal["write", "read", "none"]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return "write"
    except OSError as error:
        is_readable = os.access(f"{directory}/.", os.R_OK | os.X_OK)  # "/.": False for a file
        logger.warning(
            "compile cache %s cannot be written (%s): programs%s will be compiled again in every process; "
            "choose another directory with --cache-dir or JAX_COMPILATION_CACHE_DIR",
            directory,
            error.strerror or error,
            " that it lacks" if is_readable else "",
        )
    return "read" if is_readable else "none"


def _replace_damaged_entry(warning: re.Match[str]) -> None:
    """Removes an entry that JAX cannot read, so that the program is stored again.

    JAX warns of such an entry and compiles, but never overwrites it: every process would compile again. It is removed
    at the moment of the warning, before JAX stores the program that it compiles now.
    """
    import jax

    directory = jax.config.values["jax_compilation_cache_dir"]
    if directory is None:
        return
    logger.warning("compile cache: the stored %s is damaged (%s); compiling it again", warning["program"], warning[0])
    if _find_access(Path(directory)) != "write":
        return
    entries = list(Path(directory).glob(f"{glob.escape(warning['program'])}-*-cache"))
    # The warning does not say which shape's entry it was. Where none shows its damage, all go.
    for entry in [entry for entry in entries if _is_damaged(entry)] or entries:
        try:
            entry.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("compile cache: %s cannot be removed (%s); remove it by hand", entry, error.strerror)


def _report_failed_write(warning: re.Match[str]) -> None:
    """Removes the incomplete entry of a program that JAX could not store, and warns once for all programs.

    JAX warns of each program, and leaves the incomplete entry, which every later process would find damaged.
    """
    import jax

    directory = jax.config.values["jax_compilation_cache_dir"]
    if directory is None or _find_access(Path(directory)) != "write":
        return
    for entry in Path(directory).glob(f"{glob.escape(warning['program'])}-*-cache"):
        with contextlib.suppress(OSError):
            if _is_damaged(entry):
                entry.unlink()
    _warn_of_failed_write(directory, warning["reason"])


@functools.cache  # one warning per directory and reason
def _warn_of_failed_write(directory: str, reason: str) -> None:
    logger.warning(
        "compile cache %s cannot be written (%s): programs will be compiled again in the next process; free some "
        "space, or choose another directory with --cache-dir or JAX_COMPILATION_CACHE_DIR",
        directory,
        reason,
    )


def _is_damaged(entry: Path) -> bool:
    try:
        from jax._src.compilation_cache import decompress_executable
    except ImportError:  # a JAX with other names: nobody can say
        return False
    try:
        decompress_executable(entry.read_bytes())
    except Exception:  # noqa: BLE001 - whatever the decompressor says of a damaged entry
        return True
    return False


def _handle_cache_warnings() -> None:
    on_warning("Error reading persistent compilation cache entry for '(?P<program>[^']+)'.*", _replace_damaged_entry)
    on_warning(
        r"Error writing persistent compilation cache entry for '(?P<program>[^']+)': "
        r"\w+: (\[Errno \d+\] )?(?P<reason>.*)",
        _report_failed_write,
    )


@dataclasses.dataclass(eq=False)
class CompileCount:
    """Programs that XLA compiled, and programs that came from the cache instead."""

    requested: int = 0
    from_cache: int = 0

    @property
    def compiled(self) -> int:
        return self.requested - self.from_cache


_LOOKUP = re.compile("persistent compilation cache (?P<result>hit|miss) for .* with key '(?P<key>.+)'", re.IGNORECASE)
_compiler_log = logging.getLogger("jax._src.compiler")


@dataclasses.dataclass(eq=False)
class CacheLookup:
    """JAX's look into its cache for one program."""

    key: str = ""
    """The name of the program's entry; empty where JAX did not look."""

    def entry(self, directory: Path) -> Path | None:
        """The file of the program in the cache's directory; None if there is none."""
        path = directory / f"{self.key}-cache"
        return path if self.key and path.is_file() else None


class _LookupFilter(logging.Filter):
    """Reads what JAX logs of its cache in the thread that made the filter, and drops what nobody asked to see."""

    def __init__(self, lookup: CacheLookup, on_miss: Callable[[], None]) -> None:
        super().__init__()
        self._lookup = lookup
        self._on_miss = on_miss
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread == self._thread and (found := _LOOKUP.match(record.getMessage())):
            self._lookup.key = found["key"]
            if found["result"].lower() == "miss":
                self._on_miss()
        return record.levelno >= _shown_level


_lock = threading.Lock()
_shown_level = _saved_level = logging.WARNING
_saved_disabled = False
_watching = 0


@contextlib.contextmanager
def _debug_level() -> Iterator[None]:
    """Lets the log of JAX's compiler through to filters. Several threads may be inside."""
    global _shown_level, _watching, _saved_level, _saved_disabled
    with _lock:
        if _watching == 0:
            _saved_level, _shown_level = _compiler_log.level, _compiler_log.getEffectiveLevel()
            # A logging configuration disables the loggers that it does not name.
            _saved_disabled, _compiler_log.disabled = _compiler_log.disabled, False
            if _saved_disabled:
                _shown_level = logging.CRITICAL + 1
            _compiler_log.setLevel(logging.DEBUG)
        _watching += 1
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            if _watching == 0:
                _compiler_log.setLevel(_saved_level)
                _compiler_log.disabled = _saved_disabled


@contextlib.contextmanager
def watch_cache(on_miss: Callable[[], None]) -> Iterator[CacheLookup]:
    """Tells which entry of its cache JAX looks for in this thread, and calls `on_miss` before it compiles.

    JAX has no event for either, but a line in its log. Without a cache everything is compiled: `on_miss` is called
    first.
    """
    import jax

    lookup = CacheLookup()
    if jax.config.values["jax_compilation_cache_dir"] is None:
        on_miss()
        yield lookup
        return
    listening = _LookupFilter(lookup, on_miss)
    _compiler_log.addFilter(listening)
    try:
        with _debug_level():
            yield lookup
    finally:
        _compiler_log.removeFilter(listening)


class _OpenCounts(threading.local):
    def __init__(self) -> None:
        self.counts: list[CompileCount] = []


_open = _OpenCounts()


@functools.cache
def _register_listeners() -> None:
    """JAX calls listeners in the thread that compiles."""
    import jax.monitoring

    def on_event(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            for count in _open.counts:
                count.from_cache += 1

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            for count in _open.counts:
                count.requested += 1

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)


@contextlib.contextmanager
def count_compilations() -> Iterator[CompileCount]:
    """Counts the compilations of this thread in the block."""
    with _lock:
        _register_listeners()
    count = CompileCount()
    _open.counts.append(count)
    try:
        yield count
    finally:
        _open.counts.remove(count)
