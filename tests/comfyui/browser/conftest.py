from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.comfyui.browser.frontend import Frontend, NoBrowserError, chromium
from tests.comfyui.client import ComfyClient
from tests.comfyui.server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    try:
        with chromium() as browser:
            yield browser
    except NoBrowserError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def frontend(browser: "Browser", server: ComfyServer, client: ComfyClient) -> Iterator[Frontend]:
    """A new tab of a browser that remembers nothing. Whatever the test does, our files must not complain."""
    with browser.new_context(viewport={"width": 1440, "height": 810}, locale="en-US") as context:
        frontend = Frontend(context.new_page(), server, client)
        yield frontend
        assert not frontend.complaints.found, "\n".join(frontend.complaints.found)
