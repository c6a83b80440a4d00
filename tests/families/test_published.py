"""The facts of published models in families/*/published are those of ../shared/published, both ways."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.families.registry import family_cards
from comfy_tpu.families.shared.published import part_configs, read_published
from tests.real_lists import PUBLISHED, needs_published
from tools.published_facts import MODELS, list_missing

FAMILIES = Path(__file__).parents[2] / "src" / "comfy_tpu" / "families"
HUB_IDS = [(card.package, hub_id) for card in family_cards() for model in card.models for hub_id in model.published]
PLACES = ("_name_or_path", "_commit_hash")


def facts(package: str, hub_id: str) -> dict[str, Any]:
    path = FAMILIES / package.rpartition(".")[2] / "published" / f"{hub_id.replace('/', '__')}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def real(path: Path) -> dict[str, Any]:
    return {name: value for name, value in json.loads(path.read_text()).items() if name not in PLACES}


def sources() -> dict[str, str]:
    lines = (line.split("\t") for line in (PUBLISHED / "SOURCES.tsv").read_text().splitlines())
    return {line[0]: line[4].partition(" ")[0].rstrip(":,") for line in lines}


@needs_published
@pytest.mark.parametrize(("package", "hub_id"), HUB_IDS)
def test_the_facts_are_those_of_the_real_files(package: str, hub_id: str) -> None:
    """Every real file is in the facts, and every fact has its file; others are marked as unknown."""
    known, directory = facts(package, hub_id), PUBLISHED / hub_id.replace("/", "__")
    files = {path.parent.name: path for path in directory.glob("*/*config.json") if path.parent.name != "second"}
    files = {part: path for part, path in files.items() if not part.startswith(("tokenizer", "processor"))}
    files.update(("model_index", path) for path in directory.glob("model_index.json"))

    assert set(files) == {part for part, fact in known.items() if fact["source"] != "unknown"}
    for part, path in files.items():
        assert known[part]["config"] == real(path), part
        assert known[part]["source"] == sources()[str(path.relative_to(PUBLISHED))], part
    for part in set(known) - set(files):
        if "like" in known[part]:
            assert known[part]["config"] == real(PUBLISHED / known[part]["like"]), part


def test_every_published_model_has_facts() -> None:
    assert {hub_id for models in MODELS.values() for hub_id in models} == {hub_id for _, hub_id in HUB_IDS}
    needed = {"model_index", "transformer", "vae", "text_encoder", "scheduler"}
    for package, hub_id in HUB_IDS:
        assert needed <= set(read_published(package, hub_id))
        assert not [name for config in part_configs(package, hub_id).values() for name in config if name[0] == "_"]


@needs_published
def test_what_could_not_be_had() -> None:
    """`pytest -s` prints the table."""
    missing = list(list_missing())
    sys.stdout.write("\n".join(missing))
    unknown = [
        f"{hub_id:58} {part:14}"
        for package, hub_id in HUB_IDS
        for part, fact in facts(package, hub_id).items()
        if fact["source"] == "unknown"
    ]
    assert sorted(line[: len(unknown[0])] for line in missing) == sorted(unknown)
