"""The persistent compile cache: a second process compiles nothing, and a bad cache never stops a run."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax._src.compilation_cache import compress_executable
from jax.experimental.compilation_cache import compilation_cache

from comfy_tpu.compiler.cache import cache_directory, enable_cache
from comfy_tpu.config import CacheConfig
from comfy_tpu.quiet import quiet

PROCESS = Path(__file__).with_name("run_small_transformer.py")


@pytest.fixture(autouse=True)
def cache_setting() -> Iterator[None]:
    before = jax.config.values["jax_compilation_cache_dir"]
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


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


def test_a_second_process_compiles_nothing_and_a_damaged_entry_is_replaced(tmp_path: Path) -> None:
    first = run_process(tmp_path)
    assert first["compiled"] > 0
    assert first["ready from cache"] is False
    second = run_process(tmp_path)
    assert second["compiled"] == 0
    assert second["ready from cache"] is True
    assert second["requested"] == first["requested"]
    assert second["checksum"] == first["checksum"]

    for entry in tmp_path.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    damaged = run_process(tmp_path)
    assert damaged["compiled"] == first["compiled"]
    assert damaged["checksum"] == first["checksum"]
    assert "is damaged" in damaged["stderr"]
    assert "Traceback" not in damaged["stderr"]
    healed = run_process(tmp_path)
    assert healed["compiled"] == 0


def test_only_the_damaged_entry_is_replaced(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
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
    assert "set JAX_COMPILATION_CACHE_DIR to a directory that can" in caplog.text
    seen = run_process(obstacle / "cache")
    assert seen["compiled"] == seen["requested"]
    assert "cannot be written" in seen["stderr"]


def test_a_disabled_cache_writes_nothing(tmp_path: Path) -> None:
    assert enable_cache(CacheConfig(directory=tmp_path / "cache", enabled=False)) is None
    assert not (tmp_path / "cache").exists()


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert cache_directory(CacheConfig()).parts[-2:] == ("comfy-tpu", "xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "environment"))
    assert cache_directory(CacheConfig()) == tmp_path / "environment"
    assert cache_directory(CacheConfig(directory=tmp_path)) == tmp_path
