"""For pages that are generated: they are of the versions in constraints.txt, and can be made again with those alone."""

from collections.abc import Mapping
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def only_with_the_pinned(versions: Mapping[str, str]) -> pytest.MarkDecorator:
    """Skips where other versions of these packages are installed."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    others = {name: found for name, found in versions.items() if found != pins[name]}
    return pytest.mark.skipif(
        bool(others),
        reason=f"the page is of other versions than {others}; run `pip install -c constraints.txt -e '.[dev]'` first",
    )
