"""What the package promises to whoever installs or imports it."""

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import comfy_tpu
from comfy_tpu.errors import SECTIONS
from comfy_tpu.pipeline.model_files import ModelFiles
from tests.installed_wheel import Installed, build
from tests.pins import read_pins

ROOT = Path(__file__).parents[1]
PACK = ("__init__.py", "pyproject.toml", "web", "locales", "example_workflows")
HEAVY = ("jax", "jaxlib", "torch", "torchax", "comfy", "diffusers", "transformers")


def run_python(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORTS = {
    "comfy_tpu": "import comfy_tpu",
    "errors": "import comfy_tpu.errors",
    "config": "import comfy_tpu.config",
    "cli": "import comfy_tpu.cli.main",
    "diagnosis": "import comfy_tpu.diagnosis",
    "installation": "import comfy_tpu.installation",
    "help": """
from comfy_tpu.cli.main import main
try:
    main(["--help"])
except SystemExit as leaving:
    assert leaving.code == 0
""",
}


@pytest.mark.parametrize("statement", IMPORTS.values(), ids=IMPORTS)
def test_importing_loads_nothing_heavy_and_changes_nothing(statement):
    state = "(dict(os.environ), list(warnings.filters), list(sys.path), threading.active_count())"
    code = f"""
import json, os, sys, threading, warnings
before = {state}
{statement}
after = {state}
heavy = sorted(set({HEAVY}) & {{name.split(".")[0] for name in sys.modules}})
print()
print(json.dumps([heavy, before == after]))
"""
    heavy, unchanged = json.loads(run_python(code).splitlines()[-1])
    assert heavy == []
    assert unchanged


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_file):
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Unpacked."""
    target = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", target)) as archive:
        archive.extractall(target, filter="data")
    (directory,) = (path for path in target.iterdir() if path.is_dir())
    return directory


@pytest.fixture(scope="module")
def installed(wheel_file, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed") / "environment", wheel_file)


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


@pytest.fixture(scope="module")
def requirements(metadata):
    return [Requirement(line) for line in metadata.get_all("Requires-Dist")]


def test_nothing_asked_for_can_move_a_users_torch_or_numpy(requirements):
    """With or without extras: any torch from 2.11 on and any numpy satisfy us, so pip has no reason to touch them."""
    specifiers = {name: [str(r.specifier) for r in requirements if r.name == name] for name in ("torch", "numpy")}
    assert specifiers == {"torch": [">=2.11"], "numpy": [""]}


def test_requirements_txt_is_the_same_list():
    """ComfyUI-Manager installs it; the registry and pip read pyproject.toml."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def test_requirements_are_lower_bounds_only(requirements):
    bounded = [str(r) for r in requirements if any(specifier.operator != ">=" for specifier in r.specifier)]
    assert bounded == []


def test_torchvision_and_torchaudio_are_never_asked_for(requirements):
    """Each of their releases pins one torch release."""
    assert not {"torchvision", "torchaudio"} & {requirement.name for requirement in requirements}


def test_extras(metadata):
    assert set(metadata.get_all("Provides-Extra")) == {"tpu", "cuda", "comfy", "ray", "serve", "nnx", "bench", "dev"}


def test_wheel_holds_the_package_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"comfy_tpu", f"comfy_tpu-{comfy_tpu.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert "comfy_tpu/py.typed" in wheel.namelist()


def test_wheel_holds_what_comfyui_reads(wheel):
    """All of it and nothing besides: `comfy-tpu install` links this directory where there is no checkout."""
    names = {name.removeprefix("comfy_tpu/_pack/") for name in wheel.namelist() if name.startswith("comfy_tpu/_pack/")}
    expected = {name for name in PACK if (ROOT / name).is_file()} | {"docs/images/first-frame.png"}
    for name in PACK:
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / name).rglob("*") if path.is_file()}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert names == expected
    assert {name.split("/")[0] for name in names} == {*PACK, "docs"}


def test_wheel_holds_the_servers_page(wheel):
    page = ROOT / "src" / "comfy_tpu" / "serving" / "page"
    expected = {f"comfy_tpu/serving/page/{path.name}" for path in page.iterdir()}
    assert len(expected) > 5
    assert {name for name in wheel.namelist() if "/serving/page/" in name} == expected


def test_wheel_holds_both_demo_models_once(wheel):
    """The builder follows links and keeps one of two equal folders; and a wheel of twice the size helps nobody."""
    assets = ROOT / "src" / "comfy_tpu" / "assets"
    expected = {f"comfy_tpu/assets/{path.relative_to(assets)}" for path in assets.rglob("*") if path.is_file()}
    assert {name for name in wheel.namelist() if "/assets/" in name} == expected
    large = [info for info in wheel.infolist() if info.file_size > 100_000]
    assert len({hashlib.sha256(wheel.read(info)).digest() for info in large}) == len(large)
    assert sum(info.compress_size for info in wheel.infolist()) < 28_000_000


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(wheel, sdist, tmp_path):
    with zipfile.ZipFile(build("wheel", tmp_path, sdist)) as again:
        described = [{info.filename: info.CRC for info in archive.infolist()} for archive in (wheel, again)]
    assert described[0] == described[1]
    assert not [path for path in (sdist / "src").rglob("*") if path.is_symlink()]


OPEN = """
import json, sys
import comfy_tpu
from comfy_tpu.errors import GUIDE, see
from comfy_tpu.distribution import find_page
from comfy_tpu.installation import Pack
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORIES, ModelFiles

opened = {}
for name in DEMO_DIRECTORIES:
    files = ModelFiles.open(name)
    files.tokenizer("tokenizer")
    files.defaults, files.schedulers
    opened[name] = files.fingerprint
ModelFiles.open("demo-image").image_processor("image_processor")
print(json.dumps({
    "package": comfy_tpu.__file__,
    "path": sys.path,
    "opened": opened,
    "pages": {name: find_page(name) for name in json.loads(sys.argv[1])},
    "guide": GUIDE,
    "error": see("trace"),
    "pack": str(Pack.here().directory),
}))
"""


@pytest.mark.thorough  # by default: the command of the doctor, and the files of the wheel
def test_installed_package_opens_both_demo_models_and_finds_its_pages(installed, tmp_path):
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    done = installed.run("python", "-c", OPEN, json.dumps(pages), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["package"] == str(installed.package / "__init__.py")
    assert not [path for path in found["path"] if Path(path).is_relative_to(ROOT / "src")]
    assert found["opened"] == {name: ModelFiles.open(name).fingerprint for name in ("demo", "demo-image")}
    directory = installed.package / "_pack" / "docs"
    assert found["pages"] == {name: str(directory / name) for name in pages}
    assert found["pack"] == str(installed.package / "_pack")
    guide = Path(found["guide"]).read_text(encoding="utf-8")
    assert found["error"] == f"; see {directory / 'porting.md'}#trace"
    assert set(SECTIONS) <= set(re.findall(r'<a id="([^"]+)"></a>', guide))
    for name in pages:  # those of pages lead to pages; images are left out
        links = re.findall(r"\]\(([\w.-]+\.md)(?:#[\w-]+)?\)", (directory / name).read_text(encoding="utf-8"))
        assert all((directory / link).is_file() for link in links), name


@pytest.mark.slow
@pytest.mark.parametrize("model", [[], ["--model", "demo-image", "--image", "frame.png"]], ids=["demo", "demo-image"])
def test_installed_command_runs_the_demo_models(model, installed, tmp_path):
    shutil.copy(ROOT / "docs" / "images" / "first-frame.png", tmp_path / "frame.png")
    options = ["--steps", "2", "--mesh", "single", "-o", "video.mp4"]
    done = installed.run("comfy-tpu", "generate", "a red circle moving left", *options, *model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "video.mp4").stat().st_size > 0


@pytest.mark.slow
def test_doctor_restores_an_installed_demo_model(wheel_file, tmp_path):
    """By the command that it prints, run as it is printed."""
    installed = Installed(tmp_path / "an environment", wheel_file)
    done = installed.run("comfy-tpu", "doctor", cwd=tmp_path)
    assert (done.returncode, "✓ demo models    demo, demo-image\n" in done.stdout) == (0, True), done.stdout
    shutil.rmtree(installed.package / "assets" / "demo" / "vae")
    done = installed.run("comfy-tpu", "doctor", cwd=tmp_path)
    assert done.returncode == 1
    assert "✗ demo models    model=demo lacks vae; model=demo-image lacks vae\n" in done.stdout
    (fix,) = re.findall(r"fix: (.*)", done.stdout)
    subprocess.run(fix, shell=True, check=True, cwd=tmp_path, env=installed.environment(), capture_output=True)
    done = installed.run("comfy-tpu", "doctor", cwd=tmp_path)
    assert (done.returncode, "✓ demo models    demo, demo-image\n" in done.stdout) == (0, True), done.stdout


def test_version_is_the_same_everywhere(metadata):
    assert metadata["Version"] == comfy_tpu.__version__


def test_registry_section():
    section = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["comfy"]
    assert set(section) == {"PublisherId", "DisplayName", "Icon", "requires-comfyui"}
    assert section["DisplayName"] == "ComfyUI-TPU"
    assert section["requires-comfyui"] == ">=0.7.0"


@pytest.mark.parametrize(("python", "jax"), [("3.11", "0.10.2"), ("3.12", "0.12.0.1"), ("3.13", "0.12.0.1")])
def test_constraints_satisfy_the_requirements(python, jax, requirements):
    pins = {name.lower().replace("_", "-"): version for name, version in read_pins(python).items()}
    assert pins["jax"] == pins["jaxlib"] == jax
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": "dev"}):
            assert requirement.specifier.contains(pins[requirement.name]), requirement
