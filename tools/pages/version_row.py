"""The row of the README's table that names the tested versions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from comfy_tpu.diagnosis.tested_versions import read_tested_versions
from tools.pages.sources import Json, PageError

_ROW = re.compile(r"^\| torch [^|\n]*\|[^|\n]*\|$", re.MULTILINE)


def replace_versions(page: str, name: str, texts: Json) -> str:
    """The page with a new row. `name`: the page's path, for the error; `texts`: locales/<language>/help.json."""
    if len(_ROW.findall(page)) != 1:
        raise PageError(f"{name} has no row that begins with `| torch`; put one into its table of what works")
    tested = read_tested_versions()
    words = texts["versions"]
    pythons = dict.fromkeys(".".join(version.split(".")[:2]) for version in tested.pop("python"))
    ranges = {package: _range(versions) for package, versions in tested.items()}
    row = f"| {words['row'].format(python=words['separator'].join(pythons), **ranges)} | {words['state']} |"
    return _ROW.sub(lambda _: row, page)


def _range(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]}–{versions[-1]}"
