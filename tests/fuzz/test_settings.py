"""Settings and configurations by their fields, with values of every kind: refused in a sentence, or in their range."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from comfy_tpu.cli.batch import parse_values
from comfy_tpu.config import MESH_AXES, GenerationSettings, RuntimeConfig
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.registry import family_cards
from comfy_tpu.families.settings import make_settings
from comfy_tpu.jobs import opening
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.mesh import parse_mesh
from tests.fuzz.cases import LONG, attempt, check_sentence, run_settings
from tests.fuzz.hostile_bytes import FLOATS, GOOD_TEXTS, NUMBERS, TEXTS, leaves, small_texts, values

BOUNDED = 60


@functools.cache
def cards() -> list[ModelCard]:
    return [card for family in family_cards() for card in family.models]


def _odd(default: Any) -> st.SearchStrategy[Any]:
    near = [default - 1, default + 1, -default, default * 2, default * 1.5] if isinstance(default, int | float) else []
    return st.one_of(st.just(default), st.sampled_from([default, *near]), leaves, values)


def chosen(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Values of a few fields of a dataclass; a new field is among them by itself."""
    made = kind()
    fields = {field.name: _odd(getattr(made, field.name)) for field in dataclasses.fields(kind)}
    names = st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries({name: fields[name] for name in some}))


def check_settings(card: ModelCard, said: dict[str, Any], place: Path) -> None:
    made = attempt(lambda: make_settings(card.defaults, said, card.limits), place)
    if made is None:
        return
    for field in dataclasses.fields(GenerationSettings):
        value = getattr(made, field.name)
        is_default = value == getattr(card.defaults, field.name)  # True is 1
        assert type(value) in (int, float, str) or is_default, f"{field.name}={value!r}"
        assert not isinstance(value, float) or math.isfinite(value), f"{field.name}={value!r}"
    limits = card.limits
    assert 0 < made.height <= 2**14
    assert 0 < made.width <= 2**14
    assert 1 <= made.num_frames <= max(limits.frames_max, card.defaults.num_frames, 100_000)
    assert 1 <= made.num_videos <= 2**10


def fuzz_settings(cases: int, place: Path) -> None:
    @seed(2025)
    @run_settings(cases)
    @given(st.sampled_from(cards()), chosen(GenerationSettings))
    def run(card: ModelCard, said: dict[str, Any]) -> None:
        check_settings(card, said, place)

    run()


def fuzz_runtime(cases: int, place: Path) -> None:
    """As a line of a batch or a request of a server has them."""
    names = [field.name for field in dataclasses.fields(RuntimeConfig) if field.name not in ("cache", "memory")] + [
        *("attention_window", "attention_blocks", "dense_max_tokens", "cache_dir", "strength", "control_strength"),
        *("lora", "size", "preset", "image", "reference", "transformer", "text_encoder", "model"),
    ]
    words = st.one_of(leaves, st.sampled_from(GOOD_TEXTS), values)

    @seed(2025)
    @run_settings(cases)
    @given(st.dictionaries(st.sampled_from(names), words, max_size=4))
    def run(said: dict[str, Any]) -> None:
        request = attempt(lambda: parse_values({"prompt": "a red circle", **said}, {}), place)
        if request is not None:
            attempt(lambda: opening.make_runtime(request.values), place)
            attempt(lambda: opening.choose_model(request.values), place)
            attempt(lambda: opening.parse_strengths(request.values.get("control_strength")), place)

    run()


def fuzz_texts(cases: int, place: Path) -> None:
    """Small languages of their own: meshes and slices."""
    axes = st.sampled_from((*MESH_AXES, "x", "", "DP"))
    numbers = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(FLOATS), small_texts)
    meshes = st.lists(st.builds(lambda axis, number: f"{axis}={number}", axes, numbers), max_size=4).map(",".join)
    slices = st.builds(
        lambda head, number: f"{head}-{number}", st.sampled_from(("v6e", "2xv5e", "v9", "", "x")), numbers
    )

    @seed(2025)
    @run_settings(cases)
    @given(st.one_of(meshes, slices, small_texts, st.sampled_from(TEXTS)))
    def run(text: str) -> None:
        for parse in (lambda: parse_mesh(text, 8), lambda: parse_slice(text)):
            try:
                parse()
            except ComfyTpuError as error:
                check_sentence(str(error))

    run()


PARTS = {"settings": fuzz_settings, "runtime": fuzz_runtime, "texts": fuzz_texts}


@pytest.mark.parametrize("part", PARTS)
def test_settings(part: str, tmp_path: Path) -> None:
    PARTS[part](BOUNDED, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_ten_thousand_settings(part: str, tmp_path: Path) -> None:
    PARTS[part](LONG, tmp_path)
