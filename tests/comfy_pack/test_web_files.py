"""The frontend extension's files, without a browser: tests/comfyui/browser has one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.comfy.node_text import ENGLISH

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
SCRIPTS = sorted((WEB / "js").rglob("*.js"))
LANGUAGES = ("en", "zh")

# strings.get("key"), or the key as the first word of a pair: ["key", …
_KEY = re.compile(r'(?:strings\.get\(|facts\.push\(\[)"([\w.]+)"')
_TITLE = re.compile(r'super\(strings, "(\w+)"')
_MESSAGE = re.compile(r'problem: "(\w+)"|"(not_started)"')


def strings(language: str) -> dict[str, str]:
    document: dict[str, Any] = json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))
    assert list(document) == ["comfy_tpu"], "everything else would become part of ComfyUI's own words"
    return dict(_flat(document["comfy_tpu"]))


def test_every_language_has_the_same_strings_with_the_same_values_in_them() -> None:
    english, *others = (strings(language) for language in LANGUAGES)
    for other in others:
        assert list(other) == list(english)
        for key, text in other.items():
            assert text.strip(), key
            assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", english[key])), key


def test_the_strings_are_those_that_the_panel_asks_for() -> None:
    names = ("idle", "loading", "preparing", "compiling", "encoding", "denoising", "decoding")
    stages = {f"stage.{name}" for name in names}
    source = "\n".join(script.read_text(encoding="utf-8") for script in SCRIPTS)
    asked = {*_KEY.findall(source), *_TITLE.findall(source), *map("".join, _MESSAGE.findall(source)), *stages}
    assert asked | set(ENGLISH) == set(strings("en"))


def test_the_texts_of_the_nodes_are_those_of_the_english_locale() -> None:
    english = strings("en")
    assert {key: english[key] for key in ENGLISH} == ENGLISH


@pytest.mark.parametrize(("page", "language"), [("TPUInfo.md", "en"), ("TPUInfo/en.md", "en"), ("TPUInfo/zh.md", "zh")])
def test_the_example_of_tpu_info_is_what_the_node_says(page: str, language: str) -> None:
    texts = [text for key, text in strings(language).items() if key.startswith("info.")]
    patterns = ["(?:.+)".join(map(re.escape, re.split(r"{\w+}", text))) for text in texts if text != "{model} {part}"]
    (example,) = re.findall(r"```\n(.*?)\n```", (WEB / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) > 5
    for line in example.splitlines():
        assert any(re.fullmatch(pattern, line) for pattern in patterns), line
    assert strings(language)["part.text_encoder"] in example


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.relative_to(WEB).as_posix())
def test_a_script_asks_no_other_server_and_makes_no_html_of_data(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    for forbidden in ("http://", "https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "console."):
        assert forbidden not in text
    for imported in re.findall(r'from "([^"]+)"', text):
        served = imported in ("../../../scripts/api.js", "../../../scripts/app.js")
        assert served or (script.parent / imported).is_file(), imported


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.relative_to(WEB).as_posix())
def test_what_a_script_imports_is_exported_there(script: Path) -> None:
    """A browser drops a script whose import fails, and says so in its console only."""
    text = script.read_text(encoding="utf-8")
    for names, place in re.findall(r'^import {([^}]*)} from "(\.{1,2}/[^"]+)"', text, re.MULTILINE):
        file = script.parent / place
        if file.is_relative_to(WEB) and not place.startswith("../../../scripts/"):
            exported = re.findall(
                r"^export (?:async )?(?:function\*?|class|const|let) (\w+)",
                file.read_text(encoding="utf-8"),
                re.MULTILINE,
            )
            assert {name.split(" as ")[0].strip() for name in names.split(",") if name.strip()} <= {*exported}, place


def test_the_styles_ask_no_other_server() -> None:
    for sheet in (WEB / "css").glob("*.css"):
        assert "url(" not in sheet.read_text(encoding="utf-8")
        assert "@import" not in sheet.read_text(encoding="utf-8")


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in document.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found
