"""The persistent compile cache: a second process compiles nothing, and a bad cache never stops a run."""

import base64
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.compilation_cache import compress_executable
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache import compilation_cache

import comfy_tpu
from comfy_tpu.compiler.cache import _is_damaged, cache_directory, count_compilations, enable_cache
from comfy_tpu.config import AttentionConfig, CacheConfig
from comfy_tpu.kernels import attention
from comfy_tpu.kernels.hopper import hopper_attention
from comfy_tpu.quiet import quiet
from tests.compiler.read_only import read_only
from tests.kernels.attention_reference import absent_placement

PROCESS = Path(__file__).with_name("run_small_transformer.py")


SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_hlo_source_file_canonicalization_regex",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def cache_setting() -> Iterator[None]:
    before = {name: jax.config.values[name] for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def entries(cache: Path) -> set[str]:
    return {entry.name for entry in cache.glob("*-cache")}


def run_process(cache: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, PROCESS, cache],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(("src", "."))},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


@pytest.mark.slow  # a second process by default: tests/cli/test_demo.py
def test_a_second_process_compiles_nothing_from_a_copy(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "elsewhere" / "copy"
    first = run_process(original)
    assert first["compiled"] > 0
    assert first["ready from cache"] is False
    shutil.copytree(original, copy)
    second = run_process(copy)
    assert second["compiled"] == 0
    assert second["ready from cache"] is True
    assert second["requested"] == first["requested"]
    assert second["checksum"] == first["checksum"]
    assert entries(copy) == entries(original), "a program of the copy was stored again under another key"


@pytest.mark.slow  # by default test_only_the_damaged_entry_is_replaced
def test_damaged_entries_are_replaced_by_the_next_process(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    first = run_process(original)
    shutil.copytree(original, copy)
    for entry in copy.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    damaged = run_process(copy)
    assert damaged["compiled"] == first["compiled"]
    assert damaged["checksum"] == first["checksum"]
    assert "is damaged" in damaged["stderr"]
    assert "Traceback" not in damaged["stderr"]
    sizes = [{entry.name: entry.stat().st_size for entry in cache.glob("*-cache")} for cache in (original, copy)]
    assert sizes[0].keys() == sizes[1].keys()
    assert all(sizes[1][name] > size / 2 + 1 for name, size in sizes[0].items()), "each is stored whole again"


def lower_splash() -> str:
    placement = absent_placement("tpu", "v6e")
    query = jax.ShapeDtypeStruct((1, 1, 8192, 128), jnp.bfloat16)

    def run(query: jax.Array) -> jax.Array:
        return attention(query, query, query, placement=placement, config=AttentionConfig())

    return jax.export.export(jax.jit(run), platforms=["tpu"])(query).mlir_module()


def lower_hopper() -> str:
    query = jax.ShapeDtypeStruct((1, 1, 1000, 128), jnp.bfloat16)

    def run(query: jax.Array) -> jax.Array:
        return hopper_attention(query, query, query, scale=0.1)

    return jax.export.export(jax.jit(run), platforms=["cuda"])(query).mlir_module()


def kernels_in(module: str) -> bytes:
    """The bytes of the kernels in the text of a program: base64 between escaped quotes for TPUs, escaped for GPUs."""
    encoded = b"".join(base64.b64decode(text) for text in re.findall(r"body\\22: ?\\22([A-Za-z0-9+/=]+)", module))
    return encoded or "".join(re.findall(r'module = "(ML(?:[^"\\]|\\.)*)"', module)).encode()


@pytest.mark.parametrize(
    "lower", [pytest.param(lower_splash, id="TPU"), pytest.param(lower_hopper, id="GPU", marks=pytest.mark.slow)]
)
def test_kernels_do_not_name_the_directory_they_are_installed_in(lower: Callable[[], str], tmp_path: Path) -> None:
    """They are part of the cache's keys, byte for byte."""
    place = str(Path(comfy_tpu.__file__).parents[1]).encode()
    jax.config.update("jax_hlo_source_file_canonicalization_regex", None)
    assert place in kernels_in(lower()), "this is what JAX does by itself"
    enable_cache(CacheConfig(directory=tmp_path))
    found = kernels_in(lower())
    assert place not in found
    assert b"comfy_tpu/kernels" in found


def test_only_the_damaged_entry_is_replaced(tmp_path: Path) -> None:
    enable_cache(CacheConfig(directory=tmp_path))
    healthy, damaged = tmp_path / "jit_step-aaaa-cache", tmp_path / "jit_step-bbbb-cache"
    healthy.write_bytes(compress_executable(b"program"))
    damaged.write_bytes(b"garbage")
    other = tmp_path / "jit_step_more-cccc-cache"
    other.write_bytes(b"another program's")
    with quiet():
        warnings.warn("Error reading persistent compilation cache entry for 'jit_step': broken", stacklevel=1)
    assert (healthy.exists(), damaged.exists(), other.exists()) == (True, False, True)
    blocked = tmp_path / "jit_other-dddd-cache"
    blocked.mkdir()
    with quiet():
        warnings.warn("Error reading persistent compilation cache entry for 'jit_other': broken", stacklevel=1)
    assert blocked.exists(), "what cannot be removed stops nothing"


def test_a_directory_that_cannot_be_written_warns_and_compiles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    obstacle = tmp_path / "file"
    obstacle.write_text("not a directory")
    with caplog.at_level(logging.WARNING):
        assert enable_cache(CacheConfig(directory=obstacle / "cache")) is None
    assert "cannot be written (Not a directory)" in caplog.text
    assert "choose another directory with --cache-dir or JAX_COMPILATION_CACHE_DIR" in caplog.text
    assert jax.jit(doubled)(np.ones(7)).shape == (7,)


def test_a_directory_that_can_only_be_read_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def is_cached(size: int) -> bool:
        jax.clear_caches()
        with count_compilations() as count:
            jax.jit(doubled).lower(np.ones(size)).compile()
        return count.compiled == 0

    enable_cache(CacheConfig(directory=tmp_path / "full"))
    assert not is_cached(13)
    shutil.copytree(tmp_path / "full", tmp_path / "copy")
    with read_only(tmp_path / "copy"), caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert enable_cache(CacheConfig(directory=tmp_path / "copy")) == tmp_path / "copy"
        assert is_cached(13)
        assert not is_cached(15)
        # Whoever sets this again in the same process is not answered with warnings either.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        with quiet():
            assert not is_cached(16)
            warnings.warn("Error reading persistent compilation cache entry for 'jit_doubled': broken", stacklevel=1)
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        f"compile cache {tmp_path / 'copy'} cannot be written",
        "compile cache: the stored jit_doubled is damaged",
    ]
    assert "programs that it lacks will be compiled again in every process; choose another directory" in caplog.text
    assert entries(tmp_path / "copy") == entries(tmp_path / "full")
    enable_cache(CacheConfig(directory=tmp_path / "full"))
    assert not is_cached(15)
    assert len(entries(tmp_path / "full")) == 2, "a directory that can be written is written again"


def test_a_full_disk_is_one_warning_and_leaves_no_half_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = []

    def put(self: LRUCache, key: str, value: bytes) -> None:
        (tmp_path / f"{key}-cache").write_bytes(value[: len(value) // 2])
        failed.append(key)
        raise OSError(errno.ENOSPC, "No space left on device")

    enable_cache(CacheConfig(directory=tmp_path))
    stored = tmp_path / "jit_doubled-aaaa-cache"
    stored.write_bytes(compress_executable(b"an earlier program"))
    monkeypatch.setattr(LRUCache, "put", put)
    with quiet(), caplog.at_level(logging.WARNING):
        for size in (3, 5):
            assert jax.jit(doubled)(np.ones(size)).shape == (size,)
    assert [key.startswith("jit_doubled-") for key in failed] == [True, True]
    assert caplog.messages == [
        f"compile cache {tmp_path} cannot be written (No space left on device): programs will be compiled again in the "
        "next process; free some space, or choose another directory with --cache-dir or JAX_COMPILATION_CACHE_DIR"
    ]
    assert list(tmp_path.glob("*-cache")) == [stored]


def doubled(x: jax.Array) -> jax.Array:
    return x * 2


def test_a_disabled_cache_writes_nothing(tmp_path: Path) -> None:
    assert enable_cache(CacheConfig(directory=tmp_path / "cache", enabled=False)) is None
    assert not (tmp_path / "cache").exists()


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert cache_directory(CacheConfig()).parts[-2:] == ("comfy-tpu", "xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "environment"))
    assert cache_directory(CacheConfig()) == tmp_path / "environment"
    assert cache_directory(CacheConfig(directory=tmp_path)) == tmp_path


def test_a_miss_is_told_before_the_compilation_and_a_hit_is_not(tmp_path: Path) -> None:
    """In processes of their own: JAX keeps what it has compiled."""
    code = (
        "import sys; from pathlib import Path; import jax, jax.numpy as jnp;"
        "from comfy_tpu.compiler.cache import enable_cache, watch_cache;"
        "from comfy_tpu.config import CacheConfig;"
        "enable_cache(CacheConfig(directory=Path(sys.argv[1])));"
        "lowered = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((3, 3))); told = [];"
        "exec('with watch_cache(lambda: told.append(1)): lowered.compile()'); print(len(told))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["1", "0"]
    assert "persistent" not in (runs[0].stderr + runs[1].stderr).lower()


def test_an_entry_is_not_damaged_because_jax_has_other_names(tmp_path, monkeypatch):
    (tmp_path / "good").write_bytes(compress_executable(b"program"))
    (tmp_path / "bad").write_bytes(b"program")
    assert [_is_damaged(tmp_path / name) for name in ("good", "bad")] == [False, True]
    monkeypatch.setitem(sys.modules, "jax._src.compilation_cache", None)
    assert not _is_damaged(tmp_path / "good")
