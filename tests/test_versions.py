"""Tested versions: what is installed for a test of them, how results are kept, and who reads them."""

import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from comfy_tpu.diagnosis import checks
from comfy_tpu.diagnosis.facts import Python
from comfy_tpu.diagnosis.tested_versions import describe_newer, find_bounds, read_tested_versions
from tools.pages.sources import PageError
from tools.pages.version_row import replace_versions
from tools.version_tests import __main__ as command
from tools.version_tests.environments import (
    PACKAGES,
    Environment,
    InstallationError,
    find_python,
    oldest_requirements,
)

ROOT = Path(__file__).parents[1]


def test_the_oldest_are_the_lower_bounds():
    pinned = oldest_requirements(ROOT / "pyproject.toml")
    assert {Requirement(line).name for line in pinned} == set(PACKAGES)
    assert all(str(Requirement(line).specifier).startswith("==") for line in pinned)


@pytest.mark.parametrize("bound", ["torch", "torch==2.11", "torch<3"])
def test_a_requirement_without_a_lower_bound_is_refused(bound, tmp_path):
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\ndependencies = ["{bound}"]\n')
    with pytest.raises(InstallationError, match="is no lower bound"):
        oldest_requirements(tmp_path / "pyproject.toml")


def test_a_python_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(InstallationError, match=r"Python 3\.99 is not on PATH"):
        find_python("3.99")


def test_an_environment_replaces_its_own_result(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "FILE", tmp_path / "x.json")
    for python, age, torch in (("3.12", "newest", "2.14"), ("3.11", "oldest", "2.9"), ("3.12", "newest", "2.15")):
        command.record(Environment(python, age), {"python": f"{python}.1", "packages": {"torch": torch}, "passed": 3})
    entries = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert [entry["environment"] for entry in entries] == ["3.11-oldest", "3.12-newest"]
    assert read_tested_versions(tmp_path / "x.json") == {"python": ("3.11.1", "3.12.1"), "torch": ("2.9", "2.15")}


def test_every_python_passed_with_the_oldest_and_the_newest():
    runs = json.loads((ROOT / "src/comfy_tpu/diagnosis/tested_versions.json").read_text())["runs"]
    expected = {f"{python}-{age}" for python in command.PYTHONS for age in ("oldest", "newest")}
    assert {run["environment"] for run in runs} == expected
    assert all(run["passed"] > 100 for run in runs)
    tested = read_tested_versions()
    for package, bound in (line.split("==") for line in oldest_requirements(ROOT / "pyproject.toml")):
        assert Version(tested[package][0]) == Version(bound), package


@pytest.mark.parametrize(
    ("version", "note"), [("2.9", ""), ("2.15.0", ""), ("2.16", " (newer than 2.15.0, the newest tested)")]
)
def test_the_doctor_says_what_is_newer(version, note):
    tested = ("2.11.0", "2.15.0")
    assert describe_newer(version, tested) == note
    finding = checks.check_package(Requirement("torch"), {"torch": version}, tested)
    assert (finding.status, finding.detail) == ("ok", version + note)


def test_bounds_end_before_the_next_minor_version(tmp_path):
    packages = [{"torch": "2.11.0", "jax": "0.10.2", "torchax": "0.0.13"}]
    packages += [{"torch": "2.15.1", "jax": "0.12.0.1", "torchax": "0.0.13"}]
    (tmp_path / "x.json").write_text(json.dumps({"runs": [{"python": "3.12", "packages": each} for each in packages]}))
    assert find_bounds(("torch", "jax", "torchax"), tmp_path / "x.json") == {
        "torch": ">=2.11.0,<2.16",
        "jax": ">=0.10.2,<0.13",
        "torchax": ">=0.0.13,<0.0.14",
    }


def test_a_later_patch_of_python_is_not_newer():
    assert "newer" not in checks.check_python(Python("3.13.9", "python", ">=3.11"), ("3.11.7", "3.13.0")).detail
    assert "newer than 3.13" in checks.check_python(Python("3.14.0", "python", ">=3.11"), ("3.11.7", "3.13.0")).detail


def test_a_page_without_the_row_is_named():
    with pytest.raises(PageError, match="X has no row"):
        replace_versions("| a | b |", "X", {})


def test_the_row_says_which_python_was_tested_with_one_set_only(tmp_path):
    """Otherwise the README would claim runs that nobody made."""
    packages = {"packages": {"torch": "2.11.0"}}
    runs = [{"environment": name, "python": f"{name[:4]}.1", **packages} for name in ("3.12-newest", "3.13-oldest")]
    (tmp_path / "x.json").write_text(json.dumps({"runs": [*runs, {**runs[1], "environment": "3.13-newest"}]}))
    words = {"row": "torch {torch}; Python {python}", "separator": ", ", "only": {"newest": "{python} (newest)"}}
    texts = {"versions": {**words, "state": "work"}}
    page = replace_versions("| torch x | y |", "X", texts, tmp_path / "x.json")
    assert page == "| torch 2.11.0; Python 3.12 (newest), 3.13 | work |"
