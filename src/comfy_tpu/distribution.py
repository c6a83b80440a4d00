"""How comfy-tpu is installed here: where its pages are, and the commands that repair it or install beside it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
import urllib.parse
from pathlib import Path

from comfy_tpu.json_input import parse_json

HOME_PAGE = "https://github.com/comfy-tpu/comfy-tpu"
"""As in pyproject.toml and the README, by test."""

_PACKAGE = Path(__file__).resolve().parent
_NAME = "comfy-tpu"


def find_page(name: str) -> str:
    """The path of a page of the documentation, for messages: docs/NAME in a checkout, else the installed file."""
    installed = _PACKAGE / "_pack" / "docs" / name
    return str(installed) if installed.is_file() else f"docs/{name}"


def find_locale(locale: str, name: str) -> Path:
    """The path of a file of texts: locales/LOCALE/NAME in a checkout, else the installed file."""
    root = _checkout() or _PACKAGE / "_pack"
    return root / "locales" / locale / name


def pip_command(*arguments: str, python: str | Path | None = None) -> str:
    """A pip command for this Python, or for another one; a plain `pip` may belong to a third.

    Environments that uv makes have no pip; uv takes the same arguments, but for -y.
    """
    named = str(python or sys.executable)
    if _has_pip(python):
        return shlex.join([named, "-m", "pip", *arguments])
    action, *others = arguments
    return shlex.join(["uv", "pip", action, "--python", named, *(each for each in others if each != "-y")])


def install_command(extra: str = "", *, python: str | Path | None = None) -> str:
    """A command that installs this comfy-tpu, with one of its extras, into this Python or another one."""
    return pip_command("install", _source(extra), python=python)


def restore_command(*paths: str) -> str:
    """A command that restores files of the package that are missing or damaged; `paths`: their paths in a checkout."""
    checkout = _checkout()
    if checkout is not None and (checkout / ".git").exists():
        return shlex.join(["git", "-C", str(checkout), "checkout", "--", *paths])
    return pip_command("install", "--force-reinstall", "--no-deps", _source())


def _has_pip(python: str | Path | None) -> bool:
    if python is None:
        return importlib.util.find_spec("pip") is not None
    return any(Path(python).parents[1].glob("lib*/python*/site-packages/pip"))


def _checkout() -> Path | None:
    """The root of the checkout that this package runs from; None where it was installed."""
    root = _PACKAGE.parents[1]
    return root if _PACKAGE.parent.name == "src" and (root / "pyproject.toml").is_file() else None


def _source(extra: str = "") -> str:
    """The argument with which pip installs this version: its origin as pip recorded it (PEP 610)."""
    suffix = f"[{extra}]" if extra else ""
    name = _NAME + suffix
    if (checkout := _checkout()) is not None:
        return f"{checkout}{suffix}"
    latest = f"{name} @ git+{HOME_PAGE}"
    try:
        installed = importlib.metadata.distribution(_NAME)
    except importlib.metadata.PackageNotFoundError:  # unpacked by hand
        return latest
    recorded = installed.read_text("direct_url.json")
    if recorded is None:  # from an index
        return f"{name}=={installed.version}"
    origin = parse_json(recorded)
    if "vcs_info" in origin:
        return f"{name} @ {origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}"
    url = urllib.parse.urlparse(origin["url"])
    if url.scheme != "file":
        return f"{name} @ {origin['url']}" if extra else str(origin["url"])
    place = urllib.parse.unquote(url.path)
    return f"{place}{suffix}" if Path(place).exists() else latest
