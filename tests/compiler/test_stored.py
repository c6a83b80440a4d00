"""The program store: what is found again, what never is, and what damage and limits do."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import pytest
import torch
from jax._src import compilation_cache
from jax.sharding import Mesh, NamedSharding

from comfy_tpu.compiler.blank_source import BlankSource
from comfy_tpu.compiler.cache import cache_limit, count_compilations, parse_limit
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.module_weights import find_foreign_code
from comfy_tpu.compiler.program import ProgramEvent
from comfy_tpu.compiler.stored import NotDescribableError, ProgramStore, describe, identity, open_store
from comfy_tpu.compiler.stored.entries import Entries, list_files, trim_files
from comfy_tpu.compiler.stored.store import list_programs
from comfy_tpu.config import CacheConfig
from comfy_tpu.errors import DeviceMemoryError
from comfy_tpu.parallel.mesh import make_placement
from tests.parity import small_models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheConfig:
    monkeypatch.setenv("COMFY_TPU_PROGRAM_STORE", "1")
    return CacheConfig(directory=tmp_path / "cache")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The directory of a cache after a run on one device, which tests copy, and what the run gave."""
    directory = tmp_path_factory.mktemp("finished") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMFY_TPU_PROGRAM_STORE", "1")
        return directory, Run(CacheConfig(directory=directory), "single")()


@pytest.fixture
def used(cache: CacheConfig, finished: tuple[Path, torch.Tensor]) -> CacheConfig:
    """A cache with the programs of a finished run."""
    assert cache.directory is not None
    shutil.copytree(finished[0], cache.directory)
    return cache


def forward(
    module: Any, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, return_dict: bool
) -> tuple[torch.Tensor, ...]:
    """By name, "forward" would be looked up in the module."""
    outputs: tuple[torch.Tensor, ...] = module(hidden_states, timestep, encoder_hidden_states, return_dict=return_dict)
    return outputs


class Run:
    """A small transformer, made anew as a process would make it."""

    def __init__(self, cache: CacheConfig, mesh: str = "dp=2,sp=4", **options: Any) -> None:
        self.model = small_models.transformer()
        self.events: list[ProgramEvent] = []
        self.store = open_store(cache)
        options = {"dtype": torch.float32, "cache": cache, "store": self.store, **options}
        self.component = Component(self.model.spec, self.model.config, make_placement(mesh), **options)

    def __call__(self, frames: int = 3) -> torch.Tensor:
        return self.call(self.component.load(Checkpoint.open(self.model.checkpoint)), frames)

    def call(self, weights: dict[str, jax.Array], frames: int = 3) -> torch.Tensor:
        program = self.component.program(forward, static=("return_dict",), on_event=self.events.append)
        inputs = {
            "hidden_states": torch.linspace(-1, 1, 2 * 4 * frames * 60).reshape(2, 4, frames, 6, 10),
            "timestep": torch.tensor([5, 900]),
            "encoder_hidden_states": torch.ones(2, 7, 16),
        }
        (out,) = program(weights, **inputs, return_dict=False)
        return torch.from_numpy(np.array(out))

    @property
    def stages(self) -> list[str]:
        return [event.stage for event in self.events]


STORED = ["compiling", "ready"]


@pytest.mark.default_cases("single")
@pytest.mark.parametrize("mesh", ["single", pytest.param("dp=2,sp=4", marks=pytest.mark.slow), "sp=2,tp=4"])
def test_a_second_run_traces_nothing_and_computes_the_same(cache: CacheConfig, mesh: str) -> None:
    first, second = Run(cache, mesh), Run(cache, mesh)
    expected = first()
    assert "tracing" in first.stages
    with count_compilations() as count:
        assert torch.equal(Run(cache, mesh)(), expected)
        assert torch.equal(second(), expected)
    assert count.requested == 0
    assert second.stages == STORED
    assert second.events[-1].from_cache


def test_weights_on_another_mesh_are_refused_with_a_stored_program_too(used: CacheConfig) -> None:
    run = Run(used, "single")
    weights = run.component.load(Checkpoint.open(run.model.checkpoint))
    elsewhere = Mesh(np.array(jax.devices()[1:2]).reshape(1, 1, 1), ("dp", "sp", "tp"))
    moved = {
        name: jax.device_put(array, NamedSharding(elsewhere, array.sharding.spec)) for name, array in weights.items()
    }
    with pytest.raises(ValueError, match="incompatible devices"):
        run.call(moved)


def test_the_module_is_built_only_to_trace(used: CacheConfig) -> None:
    again = Run(used, "single")
    assert again().isfinite().all()
    assert "module" not in vars(again.component)
    assert again.component.slots == Run(CacheConfig(enabled=False), "single").component.slots


@pytest.mark.thorough  # by default: a compiled one is
def test_an_executable_from_jaxs_cache_is_stored_too(cache: CacheConfig) -> None:
    """After an update of comfy-tpu JAX still has the executable, which could not be serialised a second time."""
    expected = Run(cache, "single")()
    assert cache.directory is not None
    for entry in (cache.directory / "programs").iterdir():
        entry.unlink()
    jax.clear_caches()
    second, third = Run(cache, "single"), Run(cache, "single")
    assert torch.equal(second(), expected)
    assert "tracing" in second.stages
    assert "cache_miss" not in second.stages
    assert torch.equal(third(), expected)
    assert third.stages == STORED


def other_source(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    changed = {**identity.software(), "comfy_tpu": "another"}
    monkeypatch.setattr("comfy_tpu.compiler.stored.store.software", lambda: changed)
    return {}


def other_version(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    changed = {**identity.software(), "jaxlib": "jaxlib 99"}
    monkeypatch.setattr("comfy_tpu.compiler.stored.store.software", lambda: changed)
    return {}


def other_driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(identity, "_host", lambda platform: "another processor")
    return {}


def other_flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=false")
    return {}


def other_setting(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(identity, "environment", lambda: {"jax": "another"})
    monkeypatch.setattr("comfy_tpu.compiler.stored.store.environment", lambda: {"jax": "another"})
    return {}


def other_model_source(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As if a file of diffusers had been edited."""
    monkeypatch.setattr(
        "comfy_tpu.compiler.module_weights.hash_module_sources", lambda names: dict.fromkeys(names, "x")
    )
    return {}


@pytest.mark.default_cases("other_source", "other_version")
@pytest.mark.parametrize(
    "change", [other_source, other_version, other_driver, other_flags, other_setting, other_model_source]
)
def test_a_program_of_another_origin_is_never_used(
    used: CacheConfig, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    same = Run(used, "single")
    same()
    assert same.stages == STORED
    other = Run(used, "single", **change(monkeypatch))
    other()
    assert "tracing" in other.stages


@pytest.mark.default_cases("dtype")
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "sp=2"},
        {"dtype": torch.bfloat16},
        pytest.param({"scan": False}, marks=pytest.mark.slow),
        pytest.param({"quantize": "int8"}, marks=pytest.mark.slow),
    ],
    ids=["mesh", "dtype", "scan", "quantize"],
)
def test_other_options_are_other_programs(used: CacheConfig, options: dict[str, Any]) -> None:
    other = Run(used, **({"mesh": "single"} | options))
    other()
    assert "tracing" in other.stages


def test_other_shapes_are_other_programs(used: CacheConfig) -> None:
    other = Run(used, "single")
    assert other(frames=2).shape[2] == 2
    assert "tracing" in other.stages


@pytest.mark.default_cases("entry")
@pytest.mark.parametrize("kind", ["entry", "executable", "both empty"])
def test_damage_is_replaced(cache: CacheConfig, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = Run(cache, "single")()
    assert cache.directory is not None
    entries = list((cache.directory / "programs").glob("*forward*.entry"))
    executables = list(cache.directory.glob("jit_*forward*-cache"))
    assert entries
    assert executables
    for path in {"entry": entries, "executable": executables}.get(kind, [*entries, *executables]):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(b"" if kind == "both empty" else bytes(content))
    jax.clear_caches()
    with caplog.at_level("WARNING"):
        assert torch.equal(Run(cache, "single")(), expected)
    assert "damaged" in caplog.text
    again = Run(cache, "single")
    assert torch.equal(again(), expected)
    assert again.stages == STORED


def test_an_executable_that_is_another_programs_is_replaced(cache: CacheConfig) -> None:
    expected, other = Run(cache, "single")(), Run(cache, "single")(frames=2)
    assert cache.directory is not None
    first, second = cache.directory.glob("jit_*forward*-cache")
    contents = first.read_bytes(), second.read_bytes()
    for path, content in zip((second, first), contents, strict=True):
        path.write_bytes(content)  # later than the entry was written
        os.utime(path, (time.time() + 60,) * 2)
    jax.clear_caches()
    assert torch.equal(Run(cache, "single")(), expected)
    assert torch.equal(Run(cache, "single")(frames=2), other)
    again = Run(cache, "single")
    assert torch.equal(again(), expected)
    assert again.stages == STORED


def test_an_entry_that_says_nothing_of_its_program_is_not_listed(cache: CacheConfig) -> None:
    Run(cache, "single")()
    assert cache.directory is not None
    listed = list_programs(cache.directory)
    entries = Entries(cache.directory / "programs")
    entries.write("of-another-version", {"kind": "program", "compiled": next(cache.directory.glob("*-cache")).name})
    assert [program.name for program in list_programs(cache.directory)] == [program.name for program in listed]


@pytest.mark.thorough  # by default: damage is replaced
def test_an_executable_that_was_evicted_is_compiled_again(cache: CacheConfig) -> None:
    expected = Run(cache, "single")()
    assert cache.directory is not None
    for path in cache.directory.glob("*-cache"):
        path.unlink()
    jax.clear_caches()
    assert torch.equal(Run(cache, "single")(), expected)
    again = Run(cache, "single")
    assert torch.equal(again(), expected)
    assert again.stages == STORED


def test_threads_that_write_the_same_entry_leave_a_whole_one(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    content = {"fact": list(range(5000))}
    barrier = threading.Barrier(8)

    def write() -> None:
        barrier.wait()
        for _ in range(20):
            entries.write("key", content)
            assert entries.read("key") == content

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["key.entry"]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    Entries(tmp_path / "file").write("key", {"fact": 1})
    assert "cannot be written" in caplog.text


def test_a_cache_that_can_only_be_read_is_read_and_left_as_it_is(
    used: CacheConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory only says that it cannot be written: what tries to write it all the same is seen."""

    def refuse(**_: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    assert used.directory is not None
    broken = used.directory / "programs" / f"transformer.forward-{'0' * 40}.entry"
    broken.write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in used.directory.rglob("*") if path.is_file()}
    monkeypatch.setattr("comfy_tpu.compiler.cache.tempfile.TemporaryFile", refuse)
    monkeypatch.setattr(os, "utime", lambda *_, **__: pytest.fail("a file is marked as used"))
    jax.clear_caches()
    with caplog.at_level("WARNING"):
        first = Run(CacheConfig(directory=used.directory, limit_bytes=1), "single")
        assert first().isfinite().all()
        assert first.stages == STORED
        other = Run(used, "single")
        other(frames=2)
        assert "cache_miss" in other.stages
        store = other.store
        assert store is not None
        assert store.count_programs() == (1, 0)
        assert store.load_program(broken.stem, make_placement("single").mesh) is None
    assert {path: path.read_bytes() for path in used.directory.rglob("*") if path.is_file()} == before
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        f"compile cache {used.directory} cannot be written",
        f"compile cache: {broken.name} is damaged",
    ]


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    now = time.time()
    names = [f"jit_new-{'1' * 64}-cache", f"programs/middle-{'2' * 40}.entry", f"jit_old-{'3' * 64}-cache"]
    (tmp_path / "programs").mkdir()
    for age, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (now - 100 * age, now - 100 * age))
    (tmp_path / "family-cache").write_bytes(bytes(9000))
    assert trim_files(tmp_path, 2500) == 2000
    assert [info.path for info in list_files(tmp_path)] == [tmp_path / names[1], tmp_path / names[0]]
    assert trim_files(tmp_path, 0) == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["family-cache"]


def test_a_file_that_is_larger_than_the_limit_goes_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large, older, oldest = (tmp_path / f"jit_{name}-{'1' * 64}-cache" for name in ("large", "older", "oldest"))
    for age, (path, size) in enumerate(((large, 3_000_000), (older, 900), (oldest, 900))):
        path.write_bytes(bytes(size))
        os.utime(path, (time.time() - 100 * age,) * 2)
    assert trim_files(tmp_path, 1_000_000) == 1800
    assert set(tmp_path.iterdir()) == {older, oldest}
    assert caplog.messages == [
        f"compile cache: {large.name} takes 3 MB, and all may take 1 MB together: it is not kept, and its program is "
        "compiled again in every process; set COMFY_TPU_CACHE_LIMIT to more"
    ]
    assert trim_files(tmp_path, 0) == 0
    assert len(caplog.messages) == 1, "who wants to keep nothing is not told"


def test_partial_files_of_killed_processes_go_and_those_being_written_stay(tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    old, new = (tmp_path / "programs" / f".partial-{digit * 16}" for digit in "ab")
    for path, age in ((old, 7200), (new, 0)):
        path.write_bytes(bytes(10))
        os.utime(path, (time.time() - age,) * 2)
    trim_files(tmp_path, 10**6)
    assert list((tmp_path / "programs").iterdir()) == [new]


def test_the_store_keeps_the_limit(cache: CacheConfig) -> None:
    assert cache.directory is not None
    Run(CacheConfig(directory=cache.directory, limit_bytes=40_000), "single")()
    store = ProgramStore(cache.directory, 40_000)
    store.fact("small", "a", lambda: 1)
    assert sum(info.nbytes for info in list_files(cache.directory)) <= 40_000


def test_a_limit_that_was_lowered_holds_when_the_store_is_opened(
    cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.directory is not None
    cache.directory.mkdir()

    def add(digit: str, age: float) -> Path:
        path = cache.directory / f"jit_x-{digit * 64}-cache"  # type: ignore[operator]
        path.write_bytes(bytes(1000))
        os.utime(path, (time.time() - age,) * 2)
        return path

    old, new = add("1", 60), add("2", 30)
    open_store(cache)
    monkeypatch.setenv("COMFY_TPU_CACHE_LIMIT", "1500")
    assert old.exists()
    open_store(cache)
    assert (old.exists(), new.exists()) == (False, True)
    old = add("1", 60)
    open_store(cache)
    assert old.exists(), "once in a process: this looks at every file"


def test_a_limit_that_was_lowered_holds_for_programs_that_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMFY_TPU_PROGRAM_STORE", "0")
    jax.clear_caches()
    Run(CacheConfig(directory=tmp_path), "single")()
    old = tmp_path / f"jit_old-{'1' * 64}-cache"
    old.write_bytes(bytes(10**6))
    os.utime(old, (1, 1))
    jax.clear_caches()
    again = Run(CacheConfig(directory=tmp_path, limit_bytes=10**6), "single")
    again()
    assert "cache_miss" not in again.stages
    assert not old.exists()


def test_a_store_counts_what_the_next_process_finds(cache: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.directory is not None

    def run(frames: int) -> ProgramStore:
        jax.clear_caches()
        made = Run(cache, "single")
        made(frames)
        assert made.store is not None
        return made.store

    made = run(3)
    assert made.count_programs() == run(3).count_programs() == (1, 1)
    for path in cache.directory.glob("jit_transformer_forward*"):  # as a limit removes it
        path.unlink()
    assert made.count_programs() == (1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "_BEGIN", 0.0)  # the source was changed since
        assert run(2).count_programs() == (1, 0)

    def fail(error: type[Exception], *_: Any) -> NoReturn:
        raise error

    # A JAX with other names: its own cache has the program.
    for frames, name, error in ((1, "describe_calls", AttributeError), (4, "read_cache_entry", ImportError)):
        with monkeypatch.context() as patch:
            patch.setattr(f"comfy_tpu.compiler.stored.store.{name}", functools.partial(fail, error))
            assert run(frames).count_programs() == (1, 1)


def test_a_use_makes_a_program_recent(cache: CacheConfig) -> None:
    Run(cache, "single")()
    assert cache.directory is not None
    for info in list_files(cache.directory):
        os.utime(info.path, (1, 1))
    jax.clear_caches()
    Run(cache, "single")()
    recent = {info.path.name.partition("-")[0] for info in list_files(cache.directory) if info.used > 1}
    assert {"transformer.forward", "jit_transformer_forward", "weights"} <= recent


@pytest.mark.parametrize(
    ("text", "expected"), [("20GB", 20 * 10**9), ("1.5 gb", 15 * 10**8), ("500MB", 5 * 10**8), ("7", 7)]
)
def test_limits(text: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_limit(text) == expected
    monkeypatch.setenv("COMFY_TPU_CACHE_LIMIT", text)
    assert cache_limit(CacheConfig()) == expected
    assert cache_limit(CacheConfig(limit_bytes=3)) == 3


@pytest.mark.parametrize("text", ["much", "-1GB", "1 PB", "nan", "9" * 400 + "GB"])
def test_a_limit_that_is_none_is_named(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COMFY_TPU_CACHE_LIMIT", text)
    assert cache_limit(CacheConfig()) == 20 * 10**9
    assert f"COMFY_TPU_CACHE_LIMIT={text[:40]} is no size" in caplog.text


def make_adder(number: float) -> Any:
    return lambda value: value + number


def test_descriptions_tell_functions_apart_by_what_they_close_over() -> None:
    def key(value: Any) -> str:
        return identity.digest(describe(value))

    assert key(make_adder(1.0)) == key(make_adder(1.0))
    assert key(make_adder(1.0)) != key(make_adder(2.0))
    assert key(functools.partial(make_adder, 1)) != key(functools.partial(make_adder, 2))
    assert len({key(2), key(2.0), key(True), key(1), key("1"), key((1,)), key([1]), key({1})}) == 8
    assert key({"a": 1, "b": 2}) == key({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [object(), make_adder(object())], ids=["object", "closure"])
def test_what_cannot_be_described_is_not_stored(value: Any, tmp_path: Path) -> None:
    with pytest.raises(NotDescribableError):
        describe(value)
    assert ProgramStore(tmp_path, 10**6).fact("fact", value, lambda: 5) == 5
    assert not list(tmp_path.rglob("*"))


def test_classes_that_another_package_has_patched_are_not_stored(
    cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    own = WanTransformerBlock.forward

    @functools.wraps(own)
    def patched(self: Any, *arguments: Any, **options: Any) -> Any:
        return own(self, *arguments, **options)

    monkeypatch.setattr(WanTransformerBlock, "forward", patched)
    Run(cache, "single")()
    assert cache.directory is not None
    assert not list_programs(cache.directory)


@pytest.mark.thorough  # by default: one that was patched before
def test_a_class_that_is_patched_later_is_not_stored_either(
    cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the weights are known: what a custom node would do to a running server."""
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    own = WanTransformerBlock.forward

    @functools.wraps(own)
    def halved(*given: Any, **options: Any) -> Any:
        return 0.5 * own(*given, **options)

    expected = Run(cache, "single")(frames=2)
    assert cache.directory is not None
    for entry in (cache.directory / "programs").glob("transformer.forward*"):
        entry.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(WanTransformerBlock, "forward", halved)
        assert not torch.equal(Run(cache, "single")(frames=2), expected)
    clean = Run(cache, "single")
    assert torch.equal(clean(frames=2), expected)
    assert "tracing" in clean.stages


def test_patched_attention_processors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    attention = WanAttention(dim=8, heads=2, dim_head=4, processor=WanAttnProcessor())
    assert find_foreign_code(attention) == ""
    monkeypatch.setattr(WanAttnProcessor, "__call__", lambda *given, **options: None)
    assert find_foreign_code(attention) == "WanAttnProcessor.__call__"


@pytest.mark.thorough  # by default: patched classes are not
def test_what_was_installed_after_the_start_is_not_stored(cache: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_BEGIN", 0.0)
    Run(cache, "single")()
    assert cache.directory is not None
    assert not list((cache.directory / "programs").glob("*"))


def test_two_keys_share_an_executable_that_was_compiled_anew(cache: CacheConfig) -> None:
    """JAX writes how long a compilation took beside it: the file is another one, the program is not."""
    expected = Run(cache, "single")()
    assert cache.directory is not None
    (entry,) = (cache.directory / "programs").glob("transformer.forward*")
    (executable,) = cache.directory.glob("jit_transformer_forward*")
    content = compilation_cache.decompress_executable(executable.read_bytes())
    executable.write_bytes(compilation_cache.compress_executable((99).to_bytes(4, "big") + content[4:]))
    again = Run(cache, "single")
    assert torch.equal(again(), expected)
    assert again.stages == STORED
    assert entry.is_file()


def test_no_memory_for_a_program_is_no_damage(cache: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(cache, "single")()
    assert cache.directory is not None
    before = {info.path for info in list_files(cache.directory)}

    def refuse(*_: Any) -> NoReturn:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes")

    with monkeypatch.context() as patch:
        patch.setattr("comfy_tpu.compiler.stored.store.StoredExecutable", refuse)
        with pytest.raises(DeviceMemoryError):
            Run(cache, "single")()
    assert {info.path for info in list_files(cache.directory)} == before


def test_the_limit_holds_for_programs_that_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFY_TPU_PROGRAM_STORE", "0")
    old = tmp_path / f"jit_old-{'1' * 64}-cache"
    old.write_bytes(bytes(10**6))
    os.utime(old, (1, 1))
    Run(CacheConfig(directory=tmp_path, limit_bytes=10**6), "single")()
    assert not old.exists()


@pytest.mark.thorough  # by default: a second run
def test_a_logging_configuration_does_not_switch_the_store_off(cache: CacheConfig) -> None:
    """`logging.config` disables the loggers that it does not name."""
    compiler = logging.getLogger("jax._src.compiler")
    compiler.disabled = True
    try:
        Run(cache, "single")()
        assert compiler.disabled
    finally:
        compiler.disabled = False
    again = Run(cache, "single")
    again()
    assert again.stages == STORED


def test_entries_are_as_readable_as_jaxs_own(cache: CacheConfig) -> None:
    Run(cache, "single")()
    assert cache.directory is not None
    assert len({info.path.stat().st_mode for info in list_files(cache.directory)}) == 1


def test_programs_are_listed_with_their_sizes(cache: CacheConfig) -> None:
    Run(cache, "single")()
    assert cache.directory is not None
    listed = {program.name: program for program in list_programs(cache.directory)}
    assert listed["transformer.forward"].device == "cpu"
    assert listed["transformer.forward"].nbytes > 10_000


def test_to_list_programs_is_no_use_of_them(used: CacheConfig) -> None:
    assert used.directory is not None
    for path in used.directory.rglob("*"):
        os.utime(path, (1, 2))  # read before it was written: the next reading is noted on most file systems
    for _ in range(2):
        listed = list_programs(used.directory)
        assert [program.used for program in listed] == [2] * len(listed) != []
    assert {(info.path.stat().st_atime, info.used) for info in list_files(used.directory)} == {(1, 2)}


def test_a_blank_source_has_the_headers_of_a_checkpoint_and_zeros() -> None:
    checkpoint = Checkpoint.open(small_models.transformer().checkpoint)
    blank = BlankSource(checkpoint)
    for name, info in checkpoint.tensors.items():
        assert blank.read(name).dtype == info.dtype
        assert blank.read(name).shape == info.shape
        assert not blank.read(name).any()
    blank.close()
