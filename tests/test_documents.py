"""Documents in two languages say the same, as far as their structure tells, and their links lead somewhere."""

import ast
import functools
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from comfy_tpu.cli.main import _parse
from comfy_tpu.compiler.cache import LIMIT_VARIABLE, cache_directory
from comfy_tpu.compiler.stored.store import STORE_VARIABLE
from comfy_tpu.config import CacheConfig
from comfy_tpu.diagnosis.facts import model_cache_directory
from comfy_tpu.distribution import HOME_PAGE
from comfy_tpu.errors import GUIDE, SECTIONS
from comfy_tpu.porting.traps import TRAPS
from tests.native.table import read_tables, with_chinese_tables

ROOT = Path(__file__).parents[1]
TWINS = [
    ("README.md", "README.zh-CN.md"),
    ("SECURITY.md", "SECURITY.zh-CN.md"),
    ("deploy/README.md", "deploy/README.zh-CN.md"),
    ("docs/after-frames.md", "docs/after-frames.zh-CN.md"),
    ("docs/batch.md", "docs/batch.zh-CN.md"),
    ("docs/checkpoints.md", "docs/checkpoints.zh-CN.md"),
    ("docs/comfyui.md", "docs/comfyui.zh-CN.md"),
    ("docs/control.md", "docs/control.zh-CN.md"),
    ("docs/debugging.md", "docs/debugging.zh-CN.md"),
    ("docs/defaults.md", "docs/defaults.zh-CN.md"),
    ("docs/design.md", "docs/design.zh-CN.md"),
    ("docs/few-steps.md", "docs/few-steps.zh-CN.md"),
    ("docs/hosts.md", "docs/hosts.zh-CN.md"),
    ("docs/long-videos.md", "docs/long-videos.zh-CN.md"),
    ("docs/models.md", "docs/models.zh-CN.md"),
    ("docs/native.md", "docs/native.zh-CN.md"),
    ("docs/performance.md", "docs/performance.zh-CN.md"),
    ("docs/plan.md", "docs/plan.zh-CN.md"),
    ("docs/porting.md", "docs/porting.zh-CN.md"),
    ("docs/python.md", "docs/python.zh-CN.md"),
    ("docs/requirements.md", "docs/requirements.zh-CN.md"),
    ("docs/serve.md", "docs/serve.zh-CN.md"),
    ("docs/torchax-vs-flax.md", "docs/torchax-vs-flax.zh-CN.md"),
]
DOCUMENTS = [*(name for pair in TWINS for name in pair), "CONTRIBUTING.md", "docs/aten-operators.md"]
DOCUMENTS += ["docs/porting-table.md"]
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

CITING = [*DOCUMENTS, "tools/demo_model/README.md"]
PLACES = [ROOT, ROOT / "src", ROOT / "src" / "comfy_tpu", ROOT / "tests" / "comfyui"]
"""Where a cited path may begin: the checkout, the package, and the tests that CONTRIBUTING tells about file by file."""
OWN = ["src", "tests", "tools", "docs", "web", "locales", "benchmarks", "example_workflows", "deploy"]
OWN += [path.name for path in sorted((ROOT / "src" / "comfy_tpu").iterdir()) if path.is_dir()]
FOREIGN = {
    *("custom_nodes/ComfyUI-TPU", "models/diffusers", "models/loras", "output/video", "n/a", "path/to/model"),
    *("./ComfyUI", "../ComfyUI", "~/ComfyUI", "model.py", "utils.py", "main.py", "my_model.py", "vae/", "images/"),
    *("frames/", "benchmarks/results/v6e-8.json"),
}
"""Of ComfyUI, of a user's model or results, or names that we do not use."""
PLACEHOLDER = re.compile(r"NAME|OWNER|DIR|ID|[<…*{:]")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def links(name):
    """Of images and pages, without those to other sites."""
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


def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"<[^>]*>|`", "", heading.lstrip("#").strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def sections(path):
    """Anchors of a page: those that are written, and those of its headings."""
    text = CODE.sub("", path.read_text(encoding="utf-8"))
    found = [slug(line) for line in text.splitlines() if line.startswith("#")]
    return {*re.findall(r'<a id="([^"]+)"></a>', text), *found}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_sections(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", CODE.sub("", read(name))):
        target, _, section = link.partition("#")
        if not target.startswith("http"):
            assert section in sections(page.parent / target if target else page), link


def test_every_page_for_users_has_a_twin():
    """The two that are not prose are tables of names."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    tables = {"aten-operators.md", "porting-table.md"}
    assert pages - tables == {Path(name).name for pair in TWINS for name in pair if name.startswith("docs/")}


def test_tables_of_comfyuis_own_models_are_the_same_in_chinese():
    english, chinese = read("docs/native.md"), read("docs/native.zh-CN.md")
    assert with_chinese_tables(chinese, read_tables(english)) == chinese, "run `make native-table`"
    numbers = re.compile(r"\d+e[-+]\d+|\d+ dB")
    assert numbers.findall(read_tables(chinese)) == numbers.findall(read_tables(english))


def test_every_case_of_comfyuis_own_models_is_in_the_tables():
    """A case that was added after the last `make native-table` would be missing."""
    tables = read_tables(read("docs/native.md"))
    cells = {cell.strip() for line in tables.splitlines() for cell in line.split("|")}
    calls = [
        call
        for path in (ROOT / "tests" / "native").glob("test_*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in ("at", "compare")
    ]
    named = {each.value for call in calls for each in call.args if isinstance(each, ast.Constant)}
    texts = {text for text in named if isinstance(text, str)}
    assert len(texts) > 20
    assert texts - cells - {"MODEL"} == set()


EXCERPTS = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", read("docs/torchax-vs-flax.md"), re.DOTALL | re.MULTILINE)


def source_of(path):
    """Of this project, or of an installed package."""
    package, _, rest = path.partition("/")
    if (ROOT / path).is_file():
        return read(path)
    (place,) = importlib.util.find_spec(package).submodule_search_locations
    return (Path(place) / rest).read_text(encoding="utf-8")


@pytest.mark.parametrize(("path", "excerpt"), EXCERPTS, ids=[str(number) for number in range(len(EXCERPTS))])
def test_excerpts_are_those_of_their_files(path, excerpt):
    """Line by line, but for the comments that are for type checkers."""
    lines = {line.partition("  # ")[0].rstrip() for line in source_of(path).splitlines()}
    assert [line for line in excerpt.splitlines() if line.rstrip() not in lines] == []


def test_the_frameworks_are_compared_in_pairs():
    assert len(EXCERPTS) == 12
    for (_, torch_code), (_, flax_code) in zip(EXCERPTS[::2], EXCERPTS[1::2], strict=True):
        assert torch_code != flax_code


@pytest.mark.parametrize("name", ["docs/comfyui.md", "docs/comfyui.zh-CN.md"])
def test_the_guides_name_the_caches(name, monkeypatch):
    for variable in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for directory in (cache_directory(CacheConfig()), model_cache_directory({})):
        assert f"`~/{directory.relative_to(Path.home())}`" in read(name)
    commands = re.findall(r"^comfy-tpu (cache|warm) (.*?)  ", read(name), re.MULTILINE)
    assert len(commands) == 3
    for command, arguments in commands:
        _parse([command, *arguments.split()])  # SystemExit where it has no such options
    assert f"`{LIMIT_VARIABLE}`" in read(name)
    assert f"`{STORE_VARIABLE}=0`" in read(name)
    for variable in ("HF_HOME", "HF_HUB_CACHE"):
        assert f"`{variable}`" in read(name)
        assert model_cache_directory({variable: "/elsewhere"}).is_relative_to("/elsewhere")


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
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    described = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in strings if id(node) not in described]


def test_messages_name_pages_that_are_installed():
    """By find_page, which knows where they are; tests/test_packaging.py looks for them in a wheel."""
    package = ROOT / "src" / "comfy_tpu"
    cited = {
        str(file.relative_to(ROOT)): found
        for file in package.rglob("*.py")
        if (found := [text for text in messages(file) if re.search(r"\b(docs/[\w./-]+|README)\.\w+", text)])
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


def spans(name):
    """What stands in backticks within a line."""
    return re.findall(r"`([^`\n]+)`", CODE.sub("", read(name)))


def cited_paths(name):
    """Those that name a file or directory of this project; those of hub models, of ComfyUI and of users do not."""
    blocks = [line for block in code(name) for line in block]
    words = [word for span in (*spans(name), *blocks) for word in span.split()]
    packages = [span for span in spans(name) if re.fullmatch(r"[a-z_]+/", span)]  # also of one that there is not
    files = [span for span in spans(name) if re.fullmatch(r"\w+\.py", span)]
    inside = [word for word in words if re.match(rf"({'|'.join(OWN)})/\w", word)]
    return [path for path in (*packages, *files, *inside) if path not in FOREIGN and not PLACEHOLDER.search(path)]


def exists(path):
    if "/" in path:
        return any((place / path.partition("#")[0]).exists() for place in PLACES)
    return any(any((ROOT / folder).rglob(path)) for folder in ("src", "tests", "tools"))


@pytest.mark.parametrize("name", CITING)
def test_cited_files_and_packages_exist(name):
    assert [path for path in cited_paths(name) if not exists(path)] == []


@functools.cache
def defined(folder):
    """Names of files, functions and classes in a folder of Python files."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= {path.stem, *re.findall(r"^(?:async )?(?:def|class) (\w+)", text, re.MULTILINE)}
    return found


@pytest.mark.parametrize("name", CITING)
def test_cited_tests_and_tools_exist(name):
    cited = {test for span in spans(name) for test in re.findall(r"\btest_\w+", span) if not PLACEHOLDER.search(test)}
    assert cited <= defined("tests")
    for module in re.findall(r"-m ((?:tools|tests)\.[\w.]+)", read(name)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize("name", CITING)
def test_cited_functions_exist(name):
    """`package.function` and `package.module.function`."""
    for span in spans(name):
        if match := re.fullmatch(r"(bridge|compiler|kernels|parallel|pipeline)\.((?:\w+\.)*)(\w+)", span):
            package, modules, function = match.groups()
            assert {function, *modules.split(".")[:-1]} <= defined(f"src/comfy_tpu/{package}"), span
