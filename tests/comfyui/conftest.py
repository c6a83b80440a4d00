"""Servers that the tests share: starting one takes seconds, and the first run in each compiles."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comfyui.checkout import Checkout, NoComfyUIError, find_checkout, find_pack
from tests.comfyui.client import ComfyClient
from tests.comfyui.models import LARGE_MODEL, LOCAL_MODEL, copy_demo
from tests.comfyui.native_weights import write_demo_transformer, write_demo_vae
from tests.comfyui.server import ComfyServer, running
from tests.comfyui.workflows import DEMO_TRANSFORMER, DEMO_VAE


@pytest.fixture(scope="session")
def checkout() -> Checkout:
    try:
        return find_checkout()
    except NoComfyUIError as reason:
        if os.environ.get("COMFYUI_REQUIRED"):  # where a test that skips would be taken for one that passes
            pytest.fail(str(reason))
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def server(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """Our pack and what the tests look with, for every test that leaves the server as it found it."""
    base = tmp_path_factory.mktemp("comfyui") / "base"
    write_demo_vae(base / "models" / "vae" / DEMO_VAE)
    write_demo_transformer(base / "models" / "diffusion_models" / DEMO_TRANSFORMER)
    copy_demo(base, LOCAL_MODEL)
    copy_demo(base, LARGE_MODEL, height=256, width=256)
    suite = find_pack("VHS_PATH", "ComfyUI-VideoHelperSuite", checkout)
    with running(checkout, base, packs=["probe", "native_demo", *([suite] if suite else [])]) as server:
        yield server


@pytest.fixture
def client(server: ComfyServer) -> Iterator[ComfyClient]:
    """A browser tab: its own socket, so that no test sees the messages of another."""
    with ComfyClient(server) as client:
        yield client
        assert server.alive, server.tail()


@pytest.fixture
def base(server: ComfyServer) -> Path:
    return server.base
