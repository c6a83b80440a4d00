"""The meshes that every family is compared with diffusers on."""

from collections.abc import Iterable
from typing import Any

import pytest

SINGLE, *DIVIDED = MESHES = ("single", "dp=2,tp=4", "dp=2,sp=4")


def on_every_mesh(names: str, cases: Iterable[Any]) -> pytest.MarkDecorator:
    """One case on every mesh and every case on one device; the rest is slow."""
    first, *others = (case if isinstance(case, tuple) else (case,) for case in cases)
    return pytest.mark.parametrize(
        f"mesh,{names}",
        [
            *((mesh, *first) for mesh in MESHES),
            *((SINGLE, *case) for case in others),
            *(pytest.param(mesh, *case, marks=pytest.mark.slow) for mesh in DIVIDED for case in others),
        ],
    )
