"""Servers that the tests share: starting one takes seconds, and the first run in each compiles."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comfyui.checkout import Checkout, NoComfyUIError, find_checkout
from tests.comfyui.client import ComfyClient
from tests.comfyui.server import ComfyServer, running


@pytest.fixture(scope="session")
def checkout() -> Checkout:
    try:
        return find_checkout()
    except NoComfyUIError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def server(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """Our pack and a pack of probes, for every test that leaves the server as it found it."""
    with running(checkout, tmp_path_factory.mktemp("comfyui") / "base", packs=["probe"]) as server:
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
