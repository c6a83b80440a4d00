"""Generated pages are those that `make pages` would write, and their texts are complete in both languages."""

import ast
import dataclasses
import re

import pytest

from comfy_tpu.families import registry
from comfy_tpu.hub.sizes import read_parameters
from tests.comfy_pack.loading import ROOT
from tools.pages.facts import Facts
from tools.pages.generated import built_in_cards, english_definitions, generated_files, is_stale
from tools.pages.help_page import help_page
from tools.pages.model_table import BEGIN, END, model_table, replace_table
from tools.pages.parameters import count_parameters, format_size, published_ids
from tools.pages.sources import PageError, read_nodes, read_texts

FROM_COMFYUI = {"Value not in list: model_id"}


@pytest.fixture(scope="module")
def nodes():
    return read_nodes()


def find_card(name):
    (card,) = (card for card in built_in_cards() if card.name == name)
    return card


@pytest.fixture(scope="module")
def english():
    return read_texts(ROOT, "en", "help.json")


def test_no_page_is_stale(nodes):
    stale = [name for name, text in generated_files(ROOT, built_in_cards(), nodes) if is_stale(ROOT / name, text)]
    assert not stale, f"{', '.join(stale)} are stale; run `make pages`"


def test_a_changed_card_makes_its_pages_stale(nodes):
    """And no others: the comparison finds what it is for."""
    wan, *others = built_in_cards()
    first, *rest = wan.node_sets
    first_id, *_ = first.models[0].published.items()
    model = dataclasses.replace(first.models[0], name="Wan 9", published=dict([first_id]))
    changed = dataclasses.replace(first, models=(model, *first.models[1:]))
    cards = [dataclasses.replace(wan, node_sets=(changed, *rest)), *others]
    stale = {name for name, text in generated_files(ROOT, cards, nodes) if is_stale(ROOT / name, text)}
    assert {"README.md", "docs/defaults.zh-CN.md", "web/docs/Wan21TPUPipeline/en.md"} <= stale
    assert not {name for name in stale if "LTXVideo" in name}


def test_a_family_without_chinese_texts_is_named(nodes):
    """The English pages come first, and are complete."""
    ltx = find_card("ltx_video")
    new_set = dataclasses.replace(ltx.node_sets[0], key="Painter", name="Painter")
    new = dataclasses.replace(ltx, package="somewhere.painter", title="Painter", node_sets=(new_set,))
    own = {node_id.replace("LTXVideo", "Painter"): node for node_id, node in nodes.items() if "LTXVideo" in node_id}
    own = {node_id: {**node, "id": node_id} for node_id, node in own.items()}
    pages = generated_files(ROOT, [*built_in_cards(), new], {**nodes, **own})
    found = {}
    with pytest.raises(PageError) as error:
        found.update(pages)
    assert str(error.value) == (
        "locales/zh/nodeDefs.json has no PainterTextEncoder, which the card of Painter makes; add its names and "
        "tooltips there, then run make pages"
    )
    names = [name for name, _ in generated_files(ROOT, [*built_in_cards(), new], {**nodes, **own}, ["en"])]
    assert {"web/docs/PainterTextEncoder/en.md", "web/docs/PainterTPUPipeline.md"} <= set(names)


def test_an_installed_family_has_no_pages_here(nodes, monkeypatch):
    """It brings its own; ours stay as they are, whatever is installed beside them."""
    own = tuple(package for package in registry.BUILT_IN if package != find_card("ltx_video").package)
    monkeypatch.setattr(registry, "BUILT_IN", own)
    names = dict(generated_files(ROOT, built_in_cards(), nodes))
    assert "web/docs/FluxTextEncoder/en.md" in names
    assert not {name for name in names if "LTXVideo" in name}
    assert "LTXVideo" not in names["locales/en/nodeDefs.json"]
    assert "Lightricks/LTX-Video" not in model_rows(names["README.md"])


def model_rows(page):
    return page.partition(BEGIN)[2].partition(END)[0]


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({"when": ["vidoe"], "text": "x"}, "help.json has the condition 'vidoe'; choose from video, image"),
        ({"text": "for {nmae}"}, "help.json has the placeholder 'nmae' in 'for {nmae}'; choose from name, noun"),
    ],
)
def test_a_note_that_cannot_be_used_is_named(note, message, nodes, english):
    (node_set,) = find_card("ltx_video").node_sets
    texts = {**english, "inputs": {**english["inputs"], "prompt": [note]}}
    with pytest.raises(PageError, match=re.escape(message)):
        help_page(
            Facts(node_set, texts, english_definitions(nodes), "en"), "TextEncoder", nodes["LTXVideoTextEncoder"], ()
        )


def test_a_table_without_its_markers_is_named(english):
    table = model_table(built_in_cards(), english)
    assert replace_table(f"a\n{BEGIN}\nold\n{END}\nb", "x.md", table) == f"a\n{BEGIN}\n\n{table}\n\n{END}\nb"
    for page in ("a", f"a\n{BEGIN}\nb"):
        with pytest.raises(PageError, match=r"^x\.md has no lines <!-- models"):
            replace_table(page, "x.md", table)


def test_the_table_has_the_size_of_every_published_model(english):
    counted = read_parameters()
    assert list(counted) == published_ids(), "run `make pages`"
    table = model_table(built_in_cards(), english)
    for model in (model for card in built_in_cards() for model in card.models):
        sizes = "<br>".join(format_size(counted[hub_id]) if hub_id in counted else "" for hub_id in model.published)
        assert f"| {sizes} |" in next(line for line in table.splitlines() if f"| {model.name} |" in line)


def test_the_table_says_what_a_model_takes_beside_the_prompt(english):
    """Also the videos and the references of models that have their own frames."""
    header, _, *lines = model_table(built_in_cards(), english).splitlines()
    assert " | images and videos | " in header
    rows = [line.split(" | ") for line in lines]
    given = {cells[0].removeprefix("| "): cells[4] for cells in rows}
    assert given["Wan 2.1"] == "a video to start from, optional"
    assert given["Wan 2.1 VACE"] == (
        "first and last frame, both optional<br>up to 4 references<br>a control video and a mask, optional"
    )
    assert given["Wan 2.2 Animate"] == (
        "one reference image<br>a pose video and a face video<br>a background video and a mask, optional"
    )
    assert given["Qwen-Image-Edit"] == "the image to edit"
    assert given["HunyuanVideo-1.5"] == "—"


def test_a_length_that_may_be_any_has_no_step(nodes):
    pages = dict(generated_files(ROOT, built_in_cards(), nodes))
    assert not [name for name, text in pages.items() if re.search(r"\b1n\+1", text)]
    assert "17–121, 4n+1 (default 81)" in pages["web/docs/Wan21TPUSampler/en.md"]


def test_sizes():
    assert format_size({"transformer": 14_288_491_584, "text_encoder": 5_680_910_336, "vae": 126_892_531}) == "40 GB"
    assert format_size({"transformer": 1_900_000_000}) == "3.8 GB"


@pytest.mark.parametrize(
    "hub_id",
    [
        hub_id if hub_id == "Lightricks/LTX-Video" else pytest.param(hub_id, marks=pytest.mark.slow)
        for hub_id in published_ids()
    ],
)
def test_parameters_are_those_of_the_published_configurations(hub_id):
    assert count_parameters(hub_id) == read_parameters()[hub_id], "run `make pages`"


def shape(value):
    """Keys, conditions and messages: all but the prose."""
    if isinstance(value, dict):
        return {key: each if key in ("when", "message") else shape(each) for key, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else ""


def test_both_languages_have_the_same_notes(english):
    chinese = read_texts(ROOT, "zh", "help.json")
    for texts in (english, chinese):
        assert set(texts) == {"format", "inputs", "kinds", "errors", "models", "node_sets", "tables", "versions"}
    for key in set(english) - {"models"}:  # translated names; the others stay as they are
        assert shape(english[key]) == shape(chinese[key]), key
    names = {model.name for card in built_in_cards() for model in card.models}
    assert set(chinese["models"]) <= names
    assert set(english["node_sets"]) <= {nodes.key for card in built_in_cards() for nodes in card.node_sets}


def test_every_note_is_about_an_input_or_output(nodes, english):
    for key, own in english["node_sets"].items():
        given = {each["id"] for node_id, node in nodes.items() if node_id.startswith(key) for each in node["inputs"]}
        assert set(own["inputs"]) <= given, key
        for kind, texts in own["kinds"].items():
            node = nodes[f"{key}{kind}"]
            assert set(texts.get("inputs", {})) <= {each["id"] for each in node["inputs"]}, (key, kind)
            assert set(texts.get("outputs", {})) <= {each["name"] for each in node["outputs"]}, (key, kind)


def messages():
    """Every string of the package that is not a docstring."""
    for path in (ROOT / "src" / "comfy_tpu").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        described = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                yield node.value


def test_errors_of_help_pages_are_those_of_the_code(english):
    """The longest part of each message between its values is in the code."""
    known = "\n".join(messages())
    for name, error in english["errors"].items():
        if error["message"] not in FROM_COMFYUI:
            parts = re.split(r"…|\{\w+\}|\d+|=|×|transformer|latents |image ", error["message"])
            assert max(parts, key=len).strip(" ,;") in known, name
