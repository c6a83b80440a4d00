"""What the package promises to whoever installs or imports it."""

import email
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import comfy_tpu

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
def wheel(tmp_path_factory):
    """A real wheel, built without pip so that no network is needed."""
    target = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.build import build_wheel; build_wheel({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (file,) = target.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


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
    assert set(metadata.get_all("Provides-Extra")) == {"tpu", "cuda", "comfy", "ray", "nnx", "dev"}


def test_wheel_holds_the_package_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"comfy_tpu", f"comfy_tpu-{comfy_tpu.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert "comfy_tpu/py.typed" in wheel.namelist()


def test_wheel_holds_what_comfyui_reads(wheel):
    """All of it and nothing besides: `comfy-tpu install` links this directory where there is no checkout."""
    names = {name.removeprefix("comfy_tpu/_pack/") for name in wheel.namelist() if name.startswith("comfy_tpu/_pack/")}
    expected = {name for name in PACK if (ROOT / name).is_file()}
    for name in PACK:
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / name).rglob("*") if path.is_file()}
    assert names == expected
    assert {name.split("/")[0] for name in names} == set(PACK)


def test_version_is_the_same_everywhere(metadata):
    assert metadata["Version"] == comfy_tpu.__version__


def test_registry_section():
    section = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["comfy"]
    assert set(section) == {"PublisherId", "DisplayName", "Icon", "requires-comfyui"}
    assert section["DisplayName"] == "ComfyUI-TPU"
    assert section["requires-comfyui"] == ">=0.7.0"


def test_constraints_satisfy_the_requirements(requirements):
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {r.name.lower().replace("_", "-"): next(iter(r.specifier)).version for r in map(Requirement, lines)}
    assert pins["torch"] == "2.13.0"
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": "dev"}):
            assert requirement.specifier.contains(pins[requirement.name]), requirement
