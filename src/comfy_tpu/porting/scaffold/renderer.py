"""Templates of the files that `port new` writes: templates/*.txt, with `$name` where a fact goes."""

from __future__ import annotations

import ast
import os
import shutil
import string
import subprocess
import sys
import sysconfig
from pathlib import Path

from comfy_tpu.errors import UnsupportedError

MARK = "Written by `comfy-tpu port new`"
"""A text in the first lines of a family's files."""
_DIRECTORY = Path(__file__).parent / "templates"


def render(template: str, /, **values: object) -> str:
    """The text of a template with every `$name` replaced. Raises KeyError for a name without a value."""
    text = (_DIRECTORY / f"{template}.txt").read_text(encoding="utf-8")
    return string.Template(text).substitute(values)


def render_module(template: str, /, **values: object) -> str:
    """A template of a Python module, without the imports that its values do not use, formatted where ruff is there."""
    return format_module(drop_unused_imports(render(template, **values)))


def render_directory(directory: str, /, **values: object) -> dict[str, str]:
    """All templates in and below a directory, by the paths of the files that they become."""
    root = _DIRECTORY / directory
    paths = sorted(path.relative_to(root).as_posix().removesuffix(".txt") for path in root.rglob("*.txt"))
    return {
        path: (render_module if path.endswith(".py") else render)(f"{directory}/{path}", **values) for path in paths
    }


def drop_unused_imports(text: str) -> str:
    """A template imports all that one of its families may use."""
    module = ast.parse(text)
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)} | {"annotations"}
    lines = text.splitlines()
    for node in reversed(module.body):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        kept = [alias for alias in node.names if (alias.asname or alias.name) in used]
        if len(kept) < len(node.names):
            node.names = kept
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [ast.unparse(node)] if kept else []
    return "\n".join(lines) + "\n"


def format_module(text: str) -> str:
    """Sorted imports and formatted lines; the text itself where ruff is not installed: it is for developers only."""
    ruff = _find_ruff()
    if ruff is None:
        return text
    # --isolated: the result does not depend on the directory in which the command is run.
    options = ("--quiet", "--isolated", "--line-length", "120")
    first_party = 'lint.isort.known-first-party=["comfy_tpu", "comfy_tpu_*"]'
    for command in (("check", "--select", "I", "--fix", "--config", first_party), ("format",)):
        done = subprocess.run(
            [ruff, *command, *options, "-"], input=text, capture_output=True, check=False, encoding="utf-8"
        )
        if done.returncode:
            raise UnsupportedError(f"what would be written is no Python that ruff can read: {done.stderr}")
        text = done.stdout
    return text


def _find_ruff() -> str | None:
    """Beside this Python, or on the path."""
    places = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))
    return shutil.which("ruff", path=os.pathsep.join(places))
