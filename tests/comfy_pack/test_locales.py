"""Names, tooltips and help pages in both languages: complete, and about the nodes as they are."""

import json
import re

import pytest

from comfy_tpu.families.registry import family_cards
from tests.comfy_pack.loading import ROOT
from tools.pages.facts import KINDS

LANGUAGES = ("en", "zh")
IDS = (
    *(
        f"{nodes.key}{kind}"
        for card in family_cards()
        for nodes in card.node_sets
        for kind in KINDS
        if {"ImageEncoder": nodes.has_image_encoder, "VideoEncoder": nodes.has_video_encoder}.get(kind, True)
    ),
    "TPULoraLoader",
    "TPULoadPipeline",
    "TPUOptions",
    "TPUServer",
    "TPUCompileModel",
    "TPUCompileVAE",
    "TPUCompileCLIP",
    "TPULoadDiffusionModel",
    "TPUInfo",
)
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def read(language):
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def texts(value):
    return [text for each in value.values() for text in texts(each)] if isinstance(value, dict) else [value]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_input_and_output_and_nothing_else(language, nodes):
    definitions = read(language)
    assert list(definitions) == list(nodes)
    for node_id, node in nodes.items():
        given = definitions[node_id]
        assert list(given) == ["display_name", "description", "inputs", "outputs"]
        expected = [each["id"] for each in node["inputs"]]
        if "seed" in expected:  # the frontend puts a widget behind it
            expected.insert(expected.index("seed") + 1, "control_after_generate")
        assert list(given["inputs"]) == expected
        assert list(given["outputs"]) == [str(number) for number in range(len(node["outputs"]))]
        for name, entry in (*given["inputs"].items(), *given["outputs"].items()):
            assert list(entry) == (["name"] if name == "control_after_generate" else ["name", "tooltip"])


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_are_no_format_strings(language):
    """vue-i18n gives { } @ | a meaning, and would show something else."""
    for text in texts(read(language)):
        assert text.strip()
        assert not set("{}@|") & set(text), text


def test_english_is_what_the_nodes_say_themselves(nodes):
    definitions = read("en")
    for node_id, node in nodes.items():
        given = definitions[node_id]
        assert (given["display_name"], given["description"]) == (node["display_name"], node["description"])
        for each in node["inputs"]:
            assert given["inputs"][each["id"]] == {"name": each["id"], "tooltip": each["tooltip"]}
        for number, each in enumerate(node["outputs"]):
            assert given["outputs"][str(number)] == {"name": each["name"], "tooltip": each["tooltip"]}


def test_chinese_is_chinese(nodes):
    definitions = read("zh")
    for node_id in nodes:
        given = definitions[node_id]
        for text in (given["display_name"], given["description"]):
            assert CHINESE.search(text), text
        for entry in (*given["inputs"].values(), *given["outputs"].values()):
            assert CHINESE.search(entry["name"]) or entry["name"] in ("Latent", "VAE", "CLIP")
            assert CHINESE.search(entry.get("tooltip", "中"))


def test_the_same_input_has_the_same_chinese_name_everywhere():
    found = {}
    for definition in read("zh").values():
        for name, entry in definition["inputs"].items():
            assert found.setdefault(name, entry["name"]) == entry["name"], name


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node_id", IDS)
def test_help_page(node_id, language, nodes):
    """Every input has its range and default there, every output its type. As lists: ComfyUI's help panel is narrow."""
    page = (ROOT / "web" / "docs" / node_id / f"{language}.md").read_text(encoding="utf-8")
    assert page.splitlines()[0] == f"# {read(language)[node_id]['display_name']}"
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert (
        headings
        == {
            "en": ["Inputs", "Outputs", "Example", "What errors mean"],
            "zh": ["输入", "输出", "示例", "常见错误"],
        }[language]
    )
    _, inputs, outputs, *_ = re.split(r"^## .*$", page, flags=re.MULTILINE)
    rows = {name: line for line in inputs.splitlines() if (name := _row_name(line))}
    assert list(rows) == [each["id"] for each in nodes[node_id]["inputs"]]
    for each in nodes[node_id]["inputs"]:
        if each["type"] in ("INT", "FLOAT"):
            upper = "2⁶⁴−1" if each["max"] == 2**64 - 1 else f"{each['max']:g}"
            assert f"{each['min']:g}–{upper}" in rows[each["id"]], each["id"]
            assert re.search(rf"(default|默认) {each['default']}[)）]", rows[each["id"]]), each["id"]
        for option in each.get("options", []) if each["id"] == "scheduler" else []:
            assert option in rows["scheduler"]
    rows = {name: line for line in outputs.splitlines() if (name := _row_name(line))}
    assert list(rows) == [each["name"] for each in nodes[node_id]["outputs"]]
    for each in nodes[node_id]["outputs"]:
        assert re.search(rf"— {each['type']}[:：]", rows[each["name"]])


def test_help_pages_are_where_the_frontend_looks():
    """docs/ID/LANGUAGE.md, and docs/ID.md for every other language: the English page."""
    docs = ROOT / "web" / "docs"
    assert {path.name for path in docs.iterdir()} == {*IDS, *(f"{node_id}.md" for node_id in IDS)}
    for node_id in IDS:
        assert {path.name for path in (docs / node_id).iterdir()} == {"en.md", "zh.md"}
        assert (docs / f"{node_id}.md").read_text() == (docs / node_id / "en.md").read_text()


@pytest.mark.parametrize("document", ["docs/comfyui.md", "docs/comfyui.zh-CN.md"])
def test_the_guide_has_every_range_and_default(document, nodes):
    sections = re.split(r"^### ", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE)
    for node_id in ("Wan21TextEncoder", "Wan21ImageEncoder", "Wan21TPUSampler", "Wan21TPUVAEDecoder"):
        (section,) = [section for section in sections if f"`{node_id}`" in section.splitlines()[0]]
        rows = {line.split("`")[1]: line.split("|") for line in section.splitlines() if line.startswith("| `")}
        assert list(rows) == [each["id"] for each in nodes[node_id]["inputs"]]
        for each in nodes[node_id]["inputs"]:
            _, _, default, values, _ = rows[each["id"]]
            if each["type"] in ("INT", "FLOAT"):
                upper = "2⁶⁴−1" if each["max"] == 2**64 - 1 else f"{each['max']:g}"
                assert default.strip() == str(each["default"])
                assert values.strip().startswith(f"{each['min']:g}–{upper}")
        for each in nodes[node_id]["outputs"]:
            assert re.search(rf"`{each['name']}` ?[(（]{each['type']}[)）]", section)


def _row_name(line):
    match = re.match(r"\* `(\w+)`", line)
    return match and match[1]
