"""What `auto` takes for a family on eight TPUs is what the family is compared with diffusers on."""

from pathlib import Path

import pytest

from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.registry import family_cards, load_families
from comfy_tpu.parallel.chips import CHIPS
from tests.auto_layouts import as_text, taken_by
from tests.counted_work import published_work
from tests.families.meshes import AUTO, MESHES


def taken(family: ModelFamily) -> set[str]:
    works = [published_work(name) for name in family.card.published]
    return {as_text(taken_by(work, chip, 8)) for work in works for chip in CHIPS}


_BY_DEFAULT = ("Wan 2.1", "Flux.1", "LTX-Video", "Z-Image")
"""The others have more published models, or larger ones, and take as long as all of these together."""


def first_words(name: str) -> str:
    return max((words for words in AUTO if name.startswith(words)), key=len, default="")


@pytest.mark.default_cases("Flux.1", "LTX-Video")
@pytest.mark.parametrize(
    "name", [name if name in _BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in AUTO]
)
def test_auto_takes_what_is_compared(name: str) -> None:
    families = [family for family in load_families() if first_words(family.name) == name]
    found = set().union(*map(taken, families))
    assert found - set(MESHES) == set(AUTO[name])


def test_every_family_is_named() -> None:
    """Those that `port new` wrote are compared with diffusers on meshes of their own."""
    ported = {path.stem for path in (Path(__file__).parent / "ported").glob("*.py")}
    models = [model for card in family_cards() if card.name not in ported for model in card.models]
    assert [model.name for model in models if not first_words(model.name)] == []
