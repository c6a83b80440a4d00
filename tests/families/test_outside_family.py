"""A family from outside: one directory, and one entry point. Nothing else of the package knows it.

The directory is LTX-Video's under other names, so that its results can be compared with those of the original.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comfy_tpu.bench.models import find_bench_model
from comfy_tpu.cli.main import main
from comfy_tpu.families import registry
from comfy_tpu.families.card import FamilyCard, ImageInput, NodeSet
from comfy_tpu.families.card_checks import CardError, check_card
from comfy_tpu.families.ltx_video.card import CARD, LTX_VIDEO
from comfy_tpu.families.registry import check_code, load_family
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import rank_layouts
from comfy_tpu.planning.models import find_model
from tests.comfy_pack.loading import load_pack
from tests.families import small_ltx

ROOT = Path(__file__).parents[2]
FAMILY = ROOT / "src" / "comfy_tpu" / "families" / "ltx_video"
NAMES = (
    ("comfy_tpu.families.ltx_video", "outside_family"),
    ("LTXImageToVideoPipeline", "OutsideImagePipeline"),
    ("LTXPipeline", "OutsidePipeline"),
    ("Lightricks/LTX-Video", "outside/Outside-Video"),
    ('key="LTXVideo"', 'key="Outside"'),
    ("LTX-Video", "Outside-Video"),
)


def write_distribution(place: Path, name: str, package: str) -> None:
    """What pip leaves of a distribution with one entry point."""
    info = place / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[comfy_tpu.families]\n{name} = {package}\n")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    (place / "outside_family").mkdir()
    for path in FAMILY.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for ours, theirs in NAMES:
            text = text.replace(ours, theirs)
        (place / "outside_family" / path.name).write_text(text, encoding="utf-8")
    (place / "outside_family" / "published").mkdir()
    for path in (FAMILY / "published").glob("*.json"):
        shutil.copy(path, place / "outside_family" / "published" / "outside__Outside-Video.json")
    write_distribution(place, "outside", "outside_family")
    (place / "broken_family").mkdir()
    (place / "broken_family" / "__init__.py").touch()
    (place / "broken_family" / "card.py").write_text("import a_package_that_is_not_there")
    write_distribution(place, "broken", "broken_family")
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(small_ltx.directory(), directory)
    index = json.loads((directory / "model_index.json").read_text())
    (directory / "model_index.json").write_text(json.dumps(index | {"_class_name": "OutsidePipeline"}))
    return directory


def run(installed: Path, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(installed), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert not check or done.returncode == 0, done.stderr
    return done


SIZE = ("--height", "64", "--width", "96", "--num-frames", "9", "--steps", "2", "--seed", "7", "--mesh", "single")


# One process for two commands: importing torch, jax and diffusers is most of the time of each.
COMMANDS = """
import contextlib, io, json, pathlib, sys
from comfy_tpu.cli.main import main
for name, words in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0, name
    pathlib.Path(sys.argv[2], name).write_text(out.getvalue())
"""


@pytest.fixture(scope="module")
def results(
    installed: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """What `generate` and `plan` wrote and printed, by name, and the process."""
    place = tmp_path_factory.mktemp("results")
    plan = ("Outside-Video", "--tpu", "v6e-8", "--mesh", "dp=2,sp=4", "--no-compile", "--json")
    commands = {
        "generate": ["generate", "a red circle", *SIZE, "-o", place / "outside.npy", "--model", model],
        "plan": ["plan", *plan],
    }
    return place, run(installed, "-c", COMMANDS, json.dumps(commands, default=str), place)


@pytest.mark.slow
def test_generate_makes_what_the_original_makes(results: Any, tmp_path: Path) -> None:
    place, made = results
    original = tmp_path / "original.npy"
    words = ["generate", "a red circle", *SIZE, "-o", str(original), "--model", str(small_ltx.directory())]
    assert main(words) == 0
    assert np.array_equal(np.load(place / "outside.npy"), np.load(original))
    assert re.search(r"family broken \(package broken_family\) is left out: .*a_package_that_is_not_there", made.stderr)


@pytest.mark.slow
def test_plan_knows_its_published_model(results: Any) -> None:
    place, _ = results
    ours, original = json.loads((place / "plan").read_text()), find_model("LTX-Video")
    assert ours["model"] == "outside/Outside-Video"
    assert ours["chosen"] == {"dp": 2, "sp": 4, "tp": 1}
    ranked = rank_layouts(original.workload(original.defaults), parse_slice("v6e-8"))
    theirs = {tuple(dataclasses.asdict(layout.sizes).values()): layout.memory.weights for layout in ranked}
    found = {tuple(layout["mesh"].values()): layout["memory"]["weights"] for layout in ours["layouts"]}
    assert found
    assert found.items() <= theirs.items()


@pytest.mark.slow
def test_bench_measures_it_beside_diffusers(installed: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    what = ("--model", "small:outside_family", "--what", "accuracy", "--repeats", "1")
    run(installed, "-m", "comfy_tpu.cli", "bench", *what, "--json", file)
    (measured,) = json.loads(file.read_text())["runs"]
    assert measured["model"] == "small:outside_family"
    errors = {row["peer"]: row["error"] for row in measured["rows"]}
    assert errors["eager"] == 0
    assert 0 < errors["ours"] < 1e-5


@pytest.mark.thorough  # by default: a pack's, tests/porting/test_scaffold_pack.py
def test_its_nodes_are_there(installed: Path, tmp_path: Path) -> None:
    nodes = load_pack(tmp_path, also_on_path=installed)["nodes"]
    kinds = ("TextEncoder", "ImageEncoder", "TPUSampler", "TPUVAEDecoder", "TPUPipeline")
    for kind in kinds:
        ours, theirs = nodes[f"Outside{kind}"], nodes[f"LTXVideo{kind}"]
        assert [each["id"] for each in ours["inputs"]] == [each["id"] for each in theirs["inputs"]]
        (model_id,) = [each for each in ours["inputs"] if each["id"] == "model_id"]
        assert model_id["default"] == "outside/Outside-Video"


def changed(**facts: Any) -> FamilyCard:
    """LTX-Video's card, by other names, with other facts of its model."""
    model = dataclasses.replace(LTX_VIDEO, **{"name": "Other", "published": {"o/Other": {}}, **facts})
    nodes = dataclasses.replace(CARD.node_sets[0], key="Other", models=(model,))
    return FamilyCard("other", "Other", (nodes,))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"pipeline_classes": ()}, "says of Other that it has no pipeline_classes"),
        ({"spatial_scale": 24}, "sizes are multiples of 32, and a latent has 24 pixels"),
        ({"temporal_scale": 3}, r"frames are 8n\+1, and a latent has 3"),
        ({"transformer_count": 3}, "it has 3 transformers, expected 1 or 2"),
        ({"sizes": {"S": {"height": 500}}}, "its size S cannot be used: height=500 is not divisible by 32"),
        ({"sizes": {"S": {"heigth": 512}}}, "its size S has heigth, which is no setting"),
        ({"published": {}}, "names no published model in node set Other"),
        ({"image": ImageInput("first_frame", max_images=2)}, "it takes 2 images, which only a model with reference"),
        ({"image": ImageInput("reference", last_image="optional")}, "it takes a last image and no first frame"),
        ({"image": ImageInput("first")}, "its image role is 'first', expected first_frame or reference or initial"),
        ({"guidance": "cfg"}, "its guidance is 'cfg', expected classifier_free or embedded or none"),
        ({"published": ("o/Other",)}, "its published models are no configurations by hub id"),
        ({"vae_backends": ()}, "it has no vae_backends"),
        ({"spatial_scale": 0}, "a latent has 0 pixels and 8 frames, expected 1 or more"),
        ({"transformer_count": 2}, "it has two transformers, and its defaults no boundary between them"),
    ],
)
def test_contradictory_facts_are_named(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(CardError, match=rf"the card of other .*{message}.*; correct its card\.py"):
        check_card(changed(**facts))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"key": "a b"}, "has the key 'a b', of which no node id can be made, in node set a b"),
        ({"category": ""}, "lacks the category in node set Other"),
        ({"size_max": 512}, "has size_max=512, and the default is 704, in node set Other"),
        ({"frames_max": 121}, "has frames_max=121, and the default is 161, in node set Other"),
    ],
)
def test_contradictory_facts_of_nodes_are_named(facts: dict[str, Any], message: str) -> None:
    card = changed()
    nodes = dataclasses.replace(card.node_sets[0], **facts)
    with pytest.raises(CardError, match=rf"the card of other {message}; correct its card\.py"):
        check_card(dataclasses.replace(card, node_sets=(nodes,)))


def test_a_name_that_a_card_has_twice_is_named() -> None:
    card = changed()
    with pytest.raises(CardError, match=r"the card of other names the model Other twice"):
        check_card(dataclasses.replace(card, node_sets=card.node_sets * 2))


CODELESS = """
import dataclasses
from comfy_tpu.families.card import FamilyCard
from comfy_tpu.families.ltx_video.card import CARD as LTX, LTX_VIDEO
MODEL = dataclasses.replace(LTX_VIDEO, name="Codeless", published={"c/Codeless": {}}, pipeline_classes=("Codeless",))
CARD = FamilyCard(PACKAGE, "Codeless", (dataclasses.replace(LTX.node_sets[0], key="Codeless", models=(MODEL,)),))
"""


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a package with this card, and no code that works, a family of this process until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_REGISTERED", [])

    def register(package: str, claimed: str | None = None) -> None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        card = CODELESS.replace("PACKAGE", repr(claimed or package))
        (tmp_path / package / "card.py").write_text(card, encoding="utf-8")
        (tmp_path / package / "model.py").write_text("import a_package_that_is_not_there", encoding="utf-8")
        registry.register_family(package)

    yield register
    registry.family_cards.cache_clear()


def test_a_family_whose_code_fails_is_named_and_the_others_work(register: Any, caplog: Any) -> None:
    register("codeless_family")
    found = {family.card.name for family in registry.load_families()}
    assert found == {model.name for model in registry.model_cards()} - {"Codeless"}
    said = (
        "family codeless_family (package codeless_family) is left out: its model.py cannot be used (No module named "
        "'a_package_that_is_not_there'); update that package, or uninstall it"
    )
    registry.load_families()
    assert [record.getMessage() for record in caplog.records] == [said]
    with pytest.raises(CardError, match=re.escape(said)):
        load_family("Codeless")


def test_bench_knows_its_models(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it measures is in a slow test above, its pages in tests/test_pages.py."""
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(registry, "_REGISTERED", [])
    try:
        registry.register_family("outside_family")
        for name in ("small:outside_family", "outside/Outside-Video"):
            assert find_bench_model(name).family.card.name == "Outside-Video"
    finally:
        registry.family_cards.cache_clear()


def test_the_package_of_a_card_is_its_own(register: Any) -> None:
    with pytest.raises(
        CardError, match="the card of lent_family says package='other'; write package=__package__ there"
    ):
        register("lent_family", claimed="other")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, None),
        ({"transformer_count": 2}, "says transformer_count: 2, outside.model 1; make them the same"),
        ({"image": None}, "says an image or a video as input: False, outside.model True"),
        ({"image": ImageInput("initial")}, "says an image to start from: True, outside.model False"),
        ({"limits": dataclasses.replace(LTX_VIDEO.limits, schedulers=("euler",))}, "has the schedulers euler, unipc"),
    ],
)
def test_code_that_is_not_what_the_card_says_is_named(facts: dict[str, Any], message: str | None) -> None:
    card, family = dataclasses.replace(LTX_VIDEO, **facts), load_family("LTX-Video")
    if message is None:
        check_code(card, family, "outside")
        return
    with pytest.raises(CardError, match=message):
        check_code(card, family, "outside")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed(), None),
        (
            changed(published={"lightricks/ltx-video": {}}),
            "claims the hub id lightricks/ltx-video, which comfy_tpu",
        ),
        (changed(name="LTX-Video"), "claims the model LTX-Video, which comfy_tpu.families.ltx_video has already"),
        (FamilyCard("other", "Other", ()), "lacks its package, title or node_sets"),
        (FamilyCard("other", "Other", (NodeSet("K", "K", "K", (), "L", CARD.node_sets[0].words),)), "has no models"),
    ],
)
def test_two_families_cannot_claim_the_same(other: FamilyCard, message: str | None) -> None:
    if message is None:
        check_card(other, [CARD])
        return
    with pytest.raises(CardError, match=message):
        check_card(other, [CARD])


def test_a_model_that_two_families_claim_is_refused(installed: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    shutil.copytree(installed / "outside_family", place / "rival_family")
    published = place / "rival_family" / "published"
    (published / "outside__Outside-Video.json").rename(published / "outside__Rival-Video.json")
    for path in (place / "rival_family").glob("*.py"):
        text = path.read_text().replace("outside_family", "rival_family")
        path.write_text(text.replace("Outside-Video", "Rival-Video").replace('key="Outside"', 'key="Rival"'))
    write_distribution(place, "rival", "rival_family")
    code = (
        "from comfy_tpu.families.registry import find_model_card\n"
        "find_model_card({'_class_name': 'OutsidePipeline'}, {}, {})"
    )
    both = Path(f"{installed}{os.pathsep}{place}")
    error = run(both, "-c", code, check=False).stderr
    assert (
        "the model is claimed by Outside-Video (outside_family) and Rival-Video (rival_family); uninstall one" in error
    )
