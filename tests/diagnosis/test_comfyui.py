"""What install says about the Python that ComfyUI would run in."""

import sys
from pathlib import Path

import pytest

from comfy_tpu.diagnosis import ComfyUIProbes, examine_comfyui
from comfy_tpu.diagnosis.comfyui import import_error, own_environment

REQUIREMENTS = """\
comfyui-frontend-package==1.35.9
torch
torchvision
torchaudio
aiohttp>=3.11.8  # the server
nothing-for-us; sys_platform == "win32"
--extra-index-url https://example.com

#non essential dependencies:
kornia>=0.7.1
"""
VERSIONS = {
    "comfyui-frontend-package": "1.35.9",
    "torch": "2.13.0+cpu",
    "torchvision": "0.28.0",
    "torchaudio": "2.13.0",
    "aiohttp": "3.12.0",
    "kornia": "0.8.0",
}


@pytest.fixture
def comfyui(tmp_path):
    (tmp_path / "requirements.txt").write_text(REQUIREMENTS)
    return tmp_path


def findings(directory, versions=VERSIONS, environment=None, error=None):
    asked = []

    def look_up(names):
        asked.extend(names)
        return {name: versions.get(name) for name in names}

    probes = ComfyUIProbes(lambda _: environment, lambda: Path("/opt/venv"), look_up, lambda _: error)
    found = {finding.name: finding for finding in examine_comfyui(directory, probes)}
    assert "nothing-for-us" not in asked
    return found


def test_all_is_well(comfyui):
    found = findings(comfyui)
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["its packages"].detail == "all 6 of ComfyUI's requirements.txt"
    assert found["torchvision"].detail == "torch 2.13.0+cpu and torchvision 0.28.0 work together"


def test_what_comfyui_does_not_start_without(comfyui):
    found = findings(comfyui, {**VERSIONS, "aiohttp": None, "torchvision": None})
    assert found["its packages"].status == "blocked"
    assert found["its packages"].detail == "ComfyUI needs torchvision, aiohttp, not installed here"
    assert found["its packages"].fix == f"{sys.executable} -m pip install -r {comfyui / 'requirements.txt'}"
    assert "torchvision" not in found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kornia": None}, "ComfyUI asks for kornia>=0.7.1 (here: none)"),
        ({"torchaudio": None}, "ComfyUI asks for torchaudio (here: none)"),
        (
            {"comfyui-frontend-package": "1.30.0"},
            "ComfyUI asks for comfyui-frontend-package==1.35.9 (here: 1.30.0)",
        ),
    ],
    ids=["an extra", "sound", "another version"],
)
def test_what_comfyui_would_like_to_have(changed, said, comfyui):
    finding = findings(comfyui, {**VERSIONS, **changed})["its packages"]
    assert (finding.status, finding.detail) == ("warning", said)


def test_a_torchvision_of_another_torch(comfyui):
    finding = findings(comfyui, error="RuntimeError: operator torchvision::nms does not exist")["torchvision"]
    assert finding.status == "blocked"
    assert finding.detail.endswith("do not import together: RuntimeError: operator torchvision::nms does not exist")
    assert finding.fix == f'{sys.executable} -m pip install "torch==2.13.0" torchvision'


def test_an_environment_that_is_not_this_one(comfyui):
    assert own_environment(comfyui) is None
    (comfyui / ".venv").mkdir()
    (comfyui / ".venv" / "pyvenv.cfg").touch()
    assert own_environment(comfyui) == comfyui / ".venv"
    finding = findings(comfyui, environment=comfyui / ".venv")["environment"]
    assert finding.status == "warning"
    assert finding.detail == f"ComfyUI has an environment of its own, {comfyui / '.venv'}; this is /opt/venv"
    assert f"{comfyui / '.venv'}/bin/python -m pip install comfy-tpu" in finding.fix
    assert findings(comfyui, environment=Path("/opt/venv"))["environment"].status == "ok"


def test_importing_is_tried_elsewhere():
    assert import_error(["json", "email"]) is None
    assert import_error(["json", "no_such_module"]) == "ModuleNotFoundError: No module named 'no_such_module'"


def test_without_a_requirements_file(tmp_path):
    assert findings(tmp_path)["its packages"].status == "ok"
