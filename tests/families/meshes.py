"""The meshes that every family is compared with diffusers on, and those that `auto` takes for it besides."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

SINGLE, *DIVIDED = MESHES = ("single", "dp=2,tp=4", "dp=2,sp=4")

AUTO: dict[str, tuple[str, ...]] = {
    "Wan 2.1": (),
    "Wan 2.2": ("sp=8",),
    "Flux.1": ("sp=2,tp=4", "tp=8"),
    "Flux.2": ("sp=2,tp=4", "tp=8"),
    "HunyuanVideo-1.5": (),
    "LTX-Video": ("dp=2,sp=2,tp=2",),
    "LTX-2": ("sp=4,tp=2",),
    "LTX-2.3": ("dp=2,sp=2,tp=2", "dp=4,tp=2"),
    "Z-Image": ("sp=4,tp=2", "dp=2,sp=2,tp=2"),
    "Qwen-Image": (),
}
"""What `auto` takes on eight TPUs for published models at their defaults where it is none of MESHES, by the first words
of a family's name, the longest that fit. README.md names them; test_auto_meshes.py holds the list to the ranking."""


def on_every_mesh(names: str, cases: Iterable[Any]) -> pytest.MarkDecorator:
    """The last case on one mesh; the rest is slow.

    By default, a family's other meshes, and one device, are those of its transformer by itself.
    """
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    rows = list(itertools.product(range(len(MESHES)), range(len(given))))
    return pytest.mark.parametrize(
        f"mesh,{names}",
        [
            pytest.param(MESHES[mesh], *given[case], marks=[] if (mesh, case) == rows[-1] else [pytest.mark.slow])
            for mesh, case in rows
        ],
    )
