"""How comfy-tpu is installed decides which command repairs it, and which page an error names."""

import json
import re
import sys
from pathlib import Path

import pytest

from comfy_tpu import distribution

ROOT = Path(__file__).parents[1]
PIP = f"{sys.executable} -m pip"
AGAIN = f"{PIP} install --force-reinstall --no-deps"
CLONE = "'comfy-tpu @ git+https://github.com/comfy-tpu/comfy-tpu'"


@pytest.fixture(autouse=True)
def pip_here(monkeypatch):
    """This Python has pip, and no other one has, whoever runs the tests."""
    monkeypatch.setattr(distribution, "_has_pip", lambda python: python is None)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package in site-packages, and what pip recorded about where it came from."""

    def install(origin):
        site = tmp_path / "site-packages"
        records = site / "comfy_tpu-0.1.0.dist-info"
        records.mkdir(parents=True)
        (records / "METADATA").write_text("Metadata-Version: 2.4\nName: comfy-tpu\nVersion: 0.1.0\n")
        if origin is not None:
            (records / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.syspath_prepend(site)
        monkeypatch.setattr(distribution, "_PACKAGE", site / "comfy_tpu")

    return install


def test_a_checkout_restores_its_files_and_installs_from_itself():
    assert distribution.restore_command("web", "docs") == f"git -C {ROOT} checkout -- web docs"
    assert distribution.install_command(python="/venv/bin/python") == f"uv pip install --python /venv/bin/python {ROOT}"


def test_an_unpacked_archive_of_the_checkout_is_installed_again(tmp_path, monkeypatch):
    package = tmp_path / "src" / "comfy_tpu"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(distribution, "_PACKAGE", package)
    assert distribution.restore_command("web") == f"{AGAIN} {tmp_path}"


@pytest.mark.parametrize(
    ("origin", "source", "with_ray"),
    [
        (None, "comfy-tpu==0.1.0", "'comfy-tpu[ray]==0.1.0'"),
        ({"url": f"file://{ROOT}", "dir_info": {}}, str(ROOT), f"'{ROOT}[ray]'"),
        ({"url": f"file://{ROOT}/gone%20now.whl", "archive_info": {}}, CLONE, CLONE.replace(" @", "[ray] @")),
        (
            {"url": "https://example.com/a.whl", "archive_info": {}},
            "https://example.com/a.whl",
            "'comfy-tpu[ray] @ https://example.com/a.whl'",
        ),
        (
            {"url": "https://example.com/a", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "'comfy-tpu @ git+https://example.com/a@c0ffee'",
            "'comfy-tpu[ray] @ git+https://example.com/a@c0ffee'",
        ),
    ],
    ids=["index", "directory", "file that is gone", "address", "repository"],
)
def test_an_installed_package_is_installed_again_from_where_it_came(installed, origin, source, with_ray):
    installed(origin)
    assert distribution.restore_command("web") == f"{AGAIN} {source}"
    assert distribution.install_command() == f"{PIP} install {source}"
    assert distribution.install_command("ray") == f"{PIP} install {with_ray}"


def test_no_command_names_an_index_that_does_not_have_us():
    """comfy-tpu is not registered: an extra is installed from where this package came from."""
    texts = [path for folder in ("src", "docs", "deploy") for path in (ROOT / folder).rglob("*")]
    texts = [path for path in (*texts, *ROOT.glob("*.md")) if path.suffix in (".py", ".md", ".txt", ".yaml", ".json")]
    named = re.compile(r"comfy-tpu\[[a-z]+\](?! @ )|pip install '?comfy-tpu(?!\S* @ )")
    assert not [str(path) for path in texts if named.search(path.read_text(encoding="utf-8"))]


def test_a_package_that_pip_does_not_know(tmp_path, monkeypatch):
    def unknown(name):
        raise distribution.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(distribution, "_PACKAGE", tmp_path / "comfy_tpu")
    monkeypatch.setattr(distribution.importlib.metadata, "distribution", unknown)
    assert distribution.restore_command("web") == f"{AGAIN} {CLONE}"


def test_where_there_is_no_pip_uv_does_it(monkeypatch):
    monkeypatch.setattr(distribution, "_has_pip", lambda python: False)
    start = f"--python {sys.executable}"
    assert distribution.pip_command("install", "torch>=2.11") == f"uv pip install {start} 'torch>=2.11'"
    assert distribution.pip_command("uninstall", "-y", "torch") == f"uv pip uninstall {start} torch"


def test_pages_of_a_checkout_are_named_as_its_readers_know_them():
    assert distribution.find_page("porting.md") == "docs/porting.md"


def test_texts_are_found_in_a_checkout_and_in_an_installed_pack(monkeypatch, tmp_path):
    assert distribution.find_locale("zh", "performance.json").is_file()
    monkeypatch.setattr(distribution, "_PACKAGE", tmp_path / "site-packages" / "comfy_tpu")
    expected = tmp_path / "site-packages/comfy_tpu/_pack/locales/zh/performance.json"
    assert distribution.find_locale("zh", "performance.json") == expected
