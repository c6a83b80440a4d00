"""For pages that are generated: they are of the versions in constraints.txt, and can be made again with those alone.

The pages in docs/ were made with the set of Python 3.11; `make test-oldest` compares them.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def read_pins(python: str) -> dict[str, str]:
    """The version of each package in constraints.txt for a Python, such as 3.12."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    }


def only_with_the_pinned(versions: Mapping[str, str]) -> pytest.MarkDecorator:
    """Skips where other versions of these packages are installed."""
    pins = read_pins("3.11")
    others = {name: found for name, found in versions.items() if found != pins[name]}
    return pytest.mark.skipif(
        bool(others),
        reason=f"the page is of other versions than {others}; run `make test-oldest`",
    )
