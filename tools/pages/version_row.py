"""The row of the README's table that names the tested versions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from comfy_tpu.diagnosis.tested_versions import FILE, read_tested_versions
from comfy_tpu.json_input import read_json
from tools.pages.sources import Json, PageError

_ROW = re.compile(r"^\| torch [^|\n]*\|[^|\n]*\|$", re.MULTILINE)


def replace_versions(page: str, name: str, texts: Json, file: Path = FILE) -> str:
    """The page with a new row. `name`: the page's path, for the error; `texts`: locales/<language>/help.json."""
    if len(_ROW.findall(page)) != 1:
        raise PageError(f"{name} has no row that begins with `| torch`; put one into its table of what works")
    tested = read_tested_versions(file)
    tested.pop("python")
    words = texts["versions"]
    pythons = _describe_pythons([run["environment"] for run in read_json(file)["runs"]], words)
    ranges = {package: _range(versions) for package, versions in tested.items()}
    row = f"| {words['row'].format(python=words['separator'].join(pythons), **ranges)} | {words['state']} |"
    return _ROW.sub(lambda _: row, page)


def _describe_pythons(environments: Sequence[str], words: Json) -> list[str]:
    """Each Python once; one that was not tested with both the oldest and the newest packages, with which it was."""
    ages: dict[str, list[str]] = {}
    for environment in environments:
        python, _, age = environment.partition("-")
        ages.setdefault(python, []).append(age)
    return [
        python if len(found) > 1 else words["only"][found[0]].format(python=python) for python, found in ages.items()
    ]


def _range(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]}–{versions[-1]}"
