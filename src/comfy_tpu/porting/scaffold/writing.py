"""Every file of a new family, and every line that goes into files that are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.json_input import parse_json
from comfy_tpu.porting.scaffold import nodes
from comfy_tpu.porting.scaffold.checkout import (
    Files,
    Link,
    check_writable,
    formatted,
    node_schemas,
    staged,
    write,
)
from comfy_tpu.porting.scaffold.edits import appended_to_tuple, inserted_before, sorted_into_list
from comfy_tpu.porting.scaffold.facts import Facts, template_of
from comfy_tpu.porting.scaffold.family_file import family_file
from comfy_tpu.porting.scaffold.parity_file import parity_file, small_file

_REGISTRY = "src/comfy_tpu/families/registry.py"
_NODE_FAMILIES = "src/comfy_tpu/comfy/node_families.py"
_PACK_TESTS = "tests/comfy_pack/"
_SERVER_TESTS = "tests/comfyui/test_families.py"
_THUMBNAILS = "tools/thumbnails.py"
CHANGED = (
    *(_REGISTRY, _NODE_FAMILIES, _THUMBNAILS, _SERVER_TESTS),
    *(f"{_PACK_TESTS}{name}" for name in ("test_nodes.py", "test_locales.py", "test_examples.py")),
    *("locales/en/nodeDefs.json", "locales/zh/nodeDefs.json", "docs/comfyui.md", "docs/comfyui.zh-CN.md"),
)
"""Files that are there, and get lines."""
_BASES = {True: ("Flux2", "flux2_tpu_basic"), False: ("HunyuanVideo15", "hunyuanvideo15_tpu_basic")}
"""Families whose nodes have the same inputs: of pictures, and of videos."""


def new_files(name: str, key: str) -> list[str]:
    pages = [f"web/docs/{key}{kind}" for kind in nodes.KINDS]
    return [
        f"src/comfy_tpu/families/{name}.py",
        f"tests/families/small_{name}.py",
        f"tests/families/test_{name}.py",
        *(f"example_workflows/{template_of(name)}.{kind}" for kind in ("json", "jpg")),
        *(f"{page}{end}" for page in pages for end in (".md", "/en.md", "/zh.md")),
    ]


def check_places(checkout: Path, name: str, key: str, *, writes: bool) -> None:
    """Whatever can be known before the model is: nothing of the family is there, and there is room for it."""
    new = new_files(name, key)
    for file in new:
        if os.path.lexists(checkout / file):
            raise InvalidValueError(f"{file} is there already, and nothing is overwritten; choose another NAME")
    if f'key="{key}"' in _read(checkout, _NODE_FAMILIES):
        raise InvalidValueError(f"there are nodes called {key} already; its pipeline has been ported before")
    if writes:
        check_writable(checkout, [*new, *CHANGED])


def all_files(facts: Facts, checkout: Path) -> Files:
    """New ones, and those that change."""
    files: Files = {
        f"src/comfy_tpu/families/{facts.name}.py": family_file(facts),
        f"tests/families/small_{facts.name}.py": small_file(facts),
        f"tests/families/test_{facts.name}.py": parity_file(facts),
        _REGISTRY: _registry(facts, _read(checkout, _REGISTRY)),
        _NODE_FAMILIES: _node_families(facts, _read(checkout, _NODE_FAMILIES)),
        _THUMBNAILS: _thumbnails(facts, _read(checkout, _THUMBNAILS)),
        _SERVER_TESTS: _server_tests(facts, _read(checkout, _SERVER_TESTS)),
        **_example_tests(facts, checkout),
    }
    with staged(checkout, files) as root:
        schemas = node_schemas(root)
        specification = f"{_PACK_TESTS}test_nodes.py"
        files[specification] = _specification(facts, _read(checkout, specification), schemas)
        write(root, {specification: files[specification]})
        files |= formatted(root, files)
        base, example = _BASES[facts.picture]
        workflow = nodes.workflow(facts, _read_json(checkout, f"example_workflows/{example}.json"), schemas)
        files |= {f"example_workflows/{facts.template}.json": workflow}
        files |= {f"example_workflows/{facts.template}.jpg": _thumbnail(facts, root)}
    files |= _pages(facts, checkout, schemas, base)
    assert set(files) == {*new_files(facts.name, facts.key), *CHANGED}
    return files


def _read(checkout: Path, name: str) -> str:
    try:
        return (checkout / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnsupportedError(
            f"{checkout} has no {name}; is this checkout another version? Nothing was written"
        ) from None


def _read_json(checkout: Path, name: str) -> Any:
    try:
        return parse_json(_read(checkout, name))
    except ValueError as error:
        raise UnsupportedError(
            f"{checkout / name} is not JSON ({error}); restore it from git. Nothing was written"
        ) from None


def _specification(facts: Facts, text: str, schemas: Mapping[str, Any]) -> str:
    anchor = r'^    "TPULoraLoader": \('
    return inserted_before(text, anchor, nodes.specified(facts, schemas), where=f"{_PACK_TESTS}test_nodes.py")


def _registry(facts: Facts, text: str) -> str:
    line = f"from comfy_tpu.families.{facts.name} import {facts.constant}\n"
    text = inserted_before(text, r"^PORTED: ", line, where=_REGISTRY)
    return _imports_first(appended_to_tuple(text, "PORTED", facts.constant, where=_REGISTRY), line)


def _imports_first(text: str, line: str) -> str:
    """The import to the others, where ruff puts it into its place."""
    text = text.replace(line, "", 1)
    at = text.index("from comfy_tpu.families.")
    return text[:at] + line + text[at:]


def _node_families(facts: Facts, text: str) -> str:
    text = inserted_before(text, r"^NODE_FAMILIES: ", nodes.node_entry(facts), where=_NODE_FAMILIES)
    return appended_to_tuple(text, "NODE_FAMILIES", facts.constant, where=_NODE_FAMILIES)


def _thumbnails(facts: Facts, text: str) -> str:
    last = "Picture" if facts.picture else "Video"
    label = facts.title if len(facts.title) <= 10 else facts.title[:9] + "."
    shown, drawn = "a purple star growing on a black background", f"{label}* Sampler* Decoder* {last}"
    entry = f'    "{facts.template}": ("{shown}", "{drawn}"),\n'
    return inserted_before(text, r"^\}\nWIDTH, HEIGHT", entry, where=_THUMBNAILS)


def _thumbnail(facts: Facts, root: Path) -> bytes:
    command = [sys.executable, "-m", "tools.thumbnails", str(root), facts.template]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(f"the example's picture could not be drawn; nothing was written:\n{done.stderr[-2000:]}")
    return (root / f"{facts.template}.jpg").read_bytes()


def _server_tests(facts: Facts, text: str) -> str:
    run = f'    ("{facts.template}.json", "small/{facts.name}"),\n'
    text = inserted_before(text, r'^\)\n"""Every family\'s example workflow', run, where=_SERVER_TESTS)
    directory = f'    "small/{facts.name}": lambda: ported.saved(small_{facts.name}.reference),\n'
    text = inserted_before(text, r"^\}\nSIZE = ", directory, where=_SERVER_TESTS)
    at = text.index("from tests.families")
    return text[:at] + f"from tests.families import ported, small_{facts.name}\n" + text[at:]


def _example_tests(facts: Facts, checkout: Path) -> dict[str, str]:
    examples, locales = f"{_PACK_TESTS}test_examples.py", f"{_PACK_TESTS}test_locales.py"
    text = sorted_into_list(_read(checkout, examples), "NAMES", facts.template, where=examples)
    text = appended_to_tuple(text, "OURS", f'"{facts.key}"', where=examples)
    plain = f'        ("{facts.template}", "{facts.key}TPUSampler"),\n'
    anchor = r"^    \],\n\)\ndef test_the_plain_examples_have"
    ids = f'    *(f"{facts.key}{{kind}}" for kind in STAGES if kind != "ImageEncoder"),\n'
    return {
        examples: inserted_before(text, anchor, plain, where=examples),
        locales: inserted_before(_read(checkout, locales), r'^    "TPULoraLoader",', ids, where=locales),
    }


def _pages(facts: Facts, checkout: Path, schemas: Mapping[str, Any], base: str) -> Files:
    files: Files = {}
    for language in ("en", "zh"):
        file = f"locales/{language}/nodeDefs.json"
        known = _read_json(checkout, file)
        own = {}
        for kind in nodes.KINDS:
            name = f"{facts.key}{kind}"
            if language == "en":
                own[name] = nodes.english(schemas[name])
            else:
                own[name] = nodes.chinese(facts, kind, schemas[name], known[f"{base}{kind}"])
            files[f"web/docs/{name}/{language}.md"] = nodes.help_page(facts, schemas[name], own[name], language)
            files[f"web/docs/{name}.md"] = Link(f"{name}/en.md")
        ordered = {name: {**known, **own}[name] for name in schemas}  # in the order of the nodes
        files[file] = json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"
    for file, heading, lora, zh in (
        ("docs/comfyui.md", r"^\n## The nodes$", r"^### TPU Load LoRA", False),
        ("docs/comfyui.zh-CN.md", r"^\n## 节点$", r"^### TPU 加载 LoRA", True),
    ):
        text = inserted_before(_read(checkout, file), heading, nodes.guide_row(facts, zh=zh), where=file)
        files[file] = inserted_before(text, lora, nodes.guide_section(facts, zh=zh), where=file)
    return files
