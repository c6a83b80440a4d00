"""Before jax is imported anywhere: eight CPU devices, so that every mesh layout can be tested on any machine.

Compiled programs are kept apart from the user's own, and shared by the workers.
"""

import contextlib
import gc
import os
import signal
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from tests.covering import mark_thorough_cases

MAPPINGS = 20_000
LONG = (
    *(
        "test_architecture.py",
        "test_imports.py",
        "families",
        "pipeline",
        "nnx",
        "cli",
        "porting",
        "parity",
        "compiler",
        "bench",
    ),
    *("test_python_guide.py", "test_facade.py", "test_packaging.py"),
)
"""In the order in which they are begun, before all others: a long file at the end leaves the other worker idle."""
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    # Test programs run for milliseconds and take longer to optimise than to run: half the time of the parity tests.
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if int(version("jaxlib").split(".")[1]) <= 10:  # a later one does not know it, and XLA ends a process for that
    # A small transformer over eight devices compiles in 3.5 s instead of 6.6 s.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
# torch's threads wait for each other by spinning. Where two workers share two cores, that is most of their time:
# diffusers' own small pipelines take 7 s of processor time with one thread and 20 s with two.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a run on an accelerator names its own
# Kept from one run to the next, and from one checkout to another: a program's key is all that it is made of.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(user_cache_path("comfy-tpu") / "test-programs"))
# Types that were checked once are not checked again, in a fresh clone either: 1 s instead of 45 s.
os.environ.setdefault("MYPY_CACHE_DIR", str(user_cache_path("comfy-tpu") / "test-types"))
# A stored program is found by the source of what it was traced from, which a monkeypatch does not change: only tests of
# the store use it.
os.environ.setdefault("COMFY_TPU_PROGRAM_STORE", "0")

# A trace makes a million small objects, and the modules of torch and transformers are a million more, which Python
# looks through again and again: 4 % of the families' tests.
gc.set_threshold(100_000, 20, 100)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts background jobs, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays, so `gc.collect()` need not look at a million objects of it each time."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="run part K, from 0, of N parts of equal size, by the tests' names")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_thorough_cases(items, whole=not any("::" in argument for argument in config.args))

    def turn(item: pytest.Item) -> int:
        top = item.path.relative_to(Path(__file__).parent).parts[0]
        return LONG.index(top) if top in LONG else len(LONG)

    if shard := config.getoption("--shard"):
        part, parts = map(int, shard.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != part]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]
    items.sort(key=turn)


@pytest.fixture
def with_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that install are pip's, also where uv made this environment, without pip."""
    from comfy_tpu import distribution

    has_pip = distribution._has_pip
    monkeypatch.setattr(distribution, "_has_pip", lambda python: python is None or has_pip(python))


@pytest.fixture(scope="module", autouse=True)
def _few_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Linux gives a process 65,530 mappings. XLA's programs for CPUs have dozens each, and it dies when there are no
    more: a worker of the whole suite came to it. Well before, all that no test needs any more are dropped."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()  # pipelines that the tests of a module share
    if _mappings() < MAPPINGS:
        return
    import jax

    gc.collect()
    jax.clear_caches()


def _mappings() -> int:
    """None are known where there is no /proc."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    return 0
