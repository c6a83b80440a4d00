import gc
from pathlib import Path

import pytest

from tests.comfyui.checkout import NoComfyUIError
from tests.native.comfyui import start_comfyui
from tests.native.table import Cell, Results

pytest.register_assert_rewrite("tests.native.models", "tests.native.sampling", "tests.native.watching")

_results = Results()


def pytest_addoption(parser):
    parser.addoption("--native-table", metavar="FILE", help="write what was tried with each architecture into FILE")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # ComfyUI and what it imports warn about themselves. Ours are checked by the tests that expect none.
            for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


def pytest_runtest_logreport(report):
    _results.add(report)


def pytest_sessionfinish(session):
    path = session.config.getoption("--native-table", None)
    if path and not hasattr(session.config, "workerinput"):
        _results.write(Path(path))


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory):
    """ComfyUI, ready to be imported; its base directory."""
    base = tmp_path_factory.mktemp("comfyui")
    for folder in ("input", "output", "temp", "models/loras", "models/diffusion_models"):
        (base / folder).mkdir(parents=True)
    try:
        start_comfyui(base)
    except NoComfyUIError as error:
        pytest.skip(str(error))
    yield base
    import comfy.model_management

    from tests.native.models import models

    gc.collect()  # ComfyUI's list of loaded models loses those that die while it is gone through
    comfy.model_management.unload_all_models()
    models.cache_clear()


@pytest.fixture
def eight_devices(comfyui):
    """Virtual ones, unless the process was started with others."""
    import jax

    if len(jax.devices()) < 8:
        pytest.skip(
            f"compares eight devices with one, and there are {len(jax.devices())} of {jax.default_backend()}; on a CPU "
            "set XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )


@pytest.fixture(autouse=True)
def watch(comfyui, monkeypatch):
    from tests.native.watching import watching

    with watching(monkeypatch) as found:
        yield found


@pytest.fixture
def cell(request):
    return Cell(request.node.user_properties)
