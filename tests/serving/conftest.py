from collections.abc import Iterator

import pytest

from tests.serving.stand_in import Served, running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all orders of a module that are refused and leave nothing; a fresh one takes a tenth of a second
    each time."""
    with running(tmp_path_factory.mktemp("shared")) as (client, service, _):
        yield client, service
