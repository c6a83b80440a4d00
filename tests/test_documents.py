"""Documents in two languages say the same, as far as their structure tells, and their links lead somewhere."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from comfy_tpu.distribution import HOME_PAGE
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


def messages(file):
    """Every string of a module that is not a docstring."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in strings if id(node) not in described]


def test_messages_name_pages_that_are_installed():
    """By find_page, which knows where they are; tests/test_packaging.py looks for them in a wheel."""
    package = ROOT / "src" / "comfy_tpu"
    writes_into_a_checkout = package / "porting" / "scaffold" / "writing.py"
    cited = {
        str(file.relative_to(ROOT)): found
        for file in package.rglob("*.py")
        if file != writes_into_a_checkout
        and (found := [text for text in messages(file) if re.search(r"\b(docs/[\w./-]+|README)\.\w+", text)])
    }
    assert cited == {}


def test_one_address():
    """Of the project, for whoever clones it, installs it or runs it."""
    urls = tomllib.loads(read("pyproject.toml"))["project"]["urls"]
    assert urls["Homepage"] == urls["Repository"] == HOME_PAGE
    assert urls["Issues"] == f"{HOME_PAGE}/issues"
    assert urls["Documentation"] == f"{HOME_PAGE}/tree/main/docs"
    for name in ("README.md", "README.zh-CN.md", "docs/comfyui.md", "docs/comfyui.zh-CN.md"):
        assert set(re.findall(r"git clone (\S+)", read(name))) == {HOME_PAGE}, name


@pytest.mark.parametrize("name", ["docs/comfyui.md", "docs/comfyui.zh-CN.md"])
def test_the_guide_names_every_template(name):
    for path in (ROOT / "example_workflows").glob("*.json"):
        assert f"`{path.stem}`" in read(name)
