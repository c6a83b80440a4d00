"""docs/requirements.md: everything that its tables name is in the tree, and what they call open is not."""

import argparse
import ast
import functools
import json
import re
from pathlib import Path

import pytest

from comfy_tpu.cli.main import COMMANDS, _parser

ROOT = Path(__file__).parents[1]
PAGES = ["docs/requirements.md", "docs/requirements.zh-CN.md"]
STATES = {"works": "已有", "differs": "不同", "open": "未完成"}
SPAN = re.compile(r"`([^`]+)`")


def rows(page, columns):
    """Cells of the tables with so many columns, without their heads."""
    lines = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    tables = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    rules = [index for index, cells in enumerate(tables) if set("".join(cells)) == {"-"}]
    heads = {index - 1 for index in rules} | set(rules)
    return [cells for index, cells in enumerate(tables) if index not in heads and len(cells) == columns]


@functools.cache
def find_tests(path):
    """Names of the tests in a file, without importing it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def has_test(span):
    path, _, name = span.partition("::")
    return (ROOT / path).is_file() and name.startswith("test_") and name in find_tests(path)


@functools.cache
def node_ids():
    return set(json.loads((ROOT / "tests" / "comfy_pack" / "golden_nodes.json").read_text(encoding="utf-8")))


@functools.cache
def make_targets():
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def has_command(words):
    """Whether `comfy-tpu` has this command, its subcommands and all of these flags."""
    parser = _parser(words)
    for word in words:
        if word.startswith("--"):
            if word not in parser._option_string_actions:
                return False
            continue
        choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        found = [names[word] for names in choices if word in names]
        if not found:
            return False
        parser = found[0]
    return True


def exists(span):
    kind, *words = span.split()
    if kind == "comfy-tpu":
        return words[0] in {command.name for command in COMMANDS} and has_command(words)
    if kind == "make":
        return words[0] in make_targets()
    return (ROOT / span).exists() or span in node_ids()


@pytest.mark.parametrize("page", PAGES)
def test_what_the_tables_name_is_there(page):
    table = rows(page, 5)
    assert len(table) > 80
    missing = [(number, span) for number, _, _, where, _ in table for span in SPAN.findall(where) if not exists(span)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_what_the_tables_are_shown_by_is_there(page):
    cited = [(number, span) for number, _, _, _, shown in rows(page, 5) for span in SPAN.findall(shown)]
    assert [each for each in cited if not has_test(each[1])] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_row_is_shown_or_open(page):
    states = STATES if page == PAGES[0] else {chinese: chinese for chinese in STATES.values()}
    opened = "open" if page == PAGES[0] else STATES["open"]
    for number, what, state, where, shown in rows(page, 5):
        assert state in states, number
        assert what, number
        assert bool(SPAN.findall(where)) == bool(SPAN.findall(shown)) == (state != opened), number


@pytest.mark.parametrize("page", PAGES)
def test_what_is_open_does_not_exist(page):
    named = [span for _, names in rows(page, 2) for span in SPAN.findall(names)]
    assert named
    there = [span for span in named if exists(span)]
    assert not there, f"{', '.join(there)}: there now; move the row of {page} up, with the test that shows it"


def test_both_languages_have_the_same_rows():
    english, chinese = (rows(page, 5) for page in PAGES)
    for ours, theirs in zip(english, chinese, strict=True):
        assert (ours[0], STATES[ours[2]], *ours[3:]) == (theirs[0], *theirs[2:])
        assert sorted(SPAN.findall(ours[1])) == sorted(SPAN.findall(theirs[1])), ours[0]
    assert [names for _, names in rows(PAGES[0], 2)] == [names for _, names in rows(PAGES[1], 2)]


def test_rows_are_numbered_by_document():
    numbers = [tuple(map(int, cells[0].split("."))) for cells in rows(PAGES[0], 5)]
    assert {document for document, _ in numbers} == {1, 2, 3, 4, 5}
    for document in range(1, 6):
        own = [row for each, row in numbers if each == document]
        assert own == list(range(1, len(own) + 1))


@pytest.mark.parametrize(
    "span",
    [
        *("src/comfy_tpu/no_such.py", "NoSuch", "make no-such"),
        *("comfy-tpu no-such", "comfy-tpu generate --no-such", "comfy-tpu port no-such"),
    ],
)
def test_the_check_sees_what_is_missing(span):
    assert not exists(span)
    assert not has_test("tests/test_requirements.py::test_no_such")
    assert has_test("tests/test_requirements.py::test_the_check_sees_what_is_missing")
