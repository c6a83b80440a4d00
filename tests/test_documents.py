"""Documents in two languages say the same, as far as their structure tells, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from comfy_tpu.errors import GUIDE, SECTIONS
from comfy_tpu.porting.traps import TRAPS

ROOT = Path(__file__).parents[1]
TWINS = [
    ("README.md", "README.zh-CN.md"),
    ("docs/comfyui.md", "docs/comfyui.zh-CN.md"),
    ("docs/plan.md", "docs/plan.zh-CN.md"),
    ("docs/porting.md", "docs/porting.zh-CN.md"),
    ("docs/torchax-vs-flax.md", "docs/torchax-vs-flax.zh-CN.md"),
]
DOCUMENTS = [*(name for pair in TWINS for name in pair), "CONTRIBUTING.md", "docs/design.md", "docs/aten-operators.md"]
DOCUMENTS += ["docs/porting-table.md"]
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def links(name):
    """Of pictures and pages, without those to other sites."""
    found = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", read(name)))
    return [link for link in found if not link.startswith(("http", "#"))]


def code(name):
    """Without comments, which are translated, and the spaces before them."""
    return [[re.sub(r"\s*#.*", "", line) for line in block.splitlines()] for block in CODE.findall(read(name))]


def headings(name):
    return [line.split()[0] for line in CODE.sub("", read(name)).splitlines() if line.startswith("#")]


def rows(name):
    return [line.count("|") for line in read(name).splitlines() if line.startswith("|")]


@pytest.mark.parametrize(("english", "chinese"), TWINS)
def test_twins(english, chinese):
    assert headings(english) == headings(chinese)
    assert rows(english) == rows(chinese)
    assert code(english) == code(chinese)
    assert Path(chinese).name in links(english)
    assert Path(english).name in links(chinese)
    # The same links in the same order, each in its own language.
    assert sorted(link.replace(".zh-CN", "") for link in links(english)) == sorted(
        link.replace(".zh-CN", "") for link in links(chinese)
    )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_pages(name):
    for link in links(name):
        if not link.endswith(".png"):
            assert (ROOT / name).parent.joinpath(link.partition("#")[0]).is_file(), link


def anchors(name):
    return re.findall(r'<a id="([^"]+)"></a>', read(name))


@pytest.mark.parametrize("name", [GUIDE, GUIDE.replace(".md", ".zh-CN.md")])
def test_the_porting_guide_has_a_section_for_every_error_and_trap(name):
    assert set(TRAPS) <= set(SECTIONS) <= set(anchors(name))
    assert len(anchors(name)) == len(set(anchors(name)))
    within = re.findall(r"\]\(#([^)]+)\)", read(name))
    assert set(within) <= set(anchors(name))
    assert anchors(name) == anchors(GUIDE), "in the same order"


@pytest.mark.parametrize("name", ["docs/comfyui.md", "docs/comfyui.zh-CN.md"])
def test_the_guide_names_every_template(name):
    for path in (ROOT / "example_workflows").glob("*.json"):
        assert f"`{path.stem}`" in read(name)
