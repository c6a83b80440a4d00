"""What install says about the Python that ComfyUI would run in."""

import sys
from pathlib import Path

import pytest

from comfy_tpu.diagnosis import ComfyUIProbes, examine_comfyui
from comfy_tpu.diagnosis.comfyui import own_environment

ROOT = Path(__file__).parents[2]
PIP = f"{sys.executable} -m pip"
pytestmark = pytest.mark.usefixtures("with_pip")
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


def findings(directory, versions=VERSIONS, environment=None):
    asked = []

    def look_up(names):
        asked.extend(names)
        return {name: versions.get(name) for name in names}

    probes = ComfyUIProbes(lambda _: environment, lambda: Path("/opt/venv"), look_up)
    found = {finding.name: finding for finding in examine_comfyui(directory, probes)}
    assert "nothing-for-us" not in asked
    return found


def test_all_is_well(comfyui):
    found = findings(comfyui)
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["its packages"].detail == "all 6 of ComfyUI's requirements.txt"


def test_what_comfyui_does_not_start_without(comfyui):
    finding = findings(comfyui, {**VERSIONS, "aiohttp": None})["its packages"]
    assert finding.status == "blocked"
    assert finding.detail == "ComfyUI needs aiohttp, not installed here"
    assert finding.fix == f"{PIP} install -r {comfyui / 'requirements.txt'} torch==2.13.0+cpu"


def test_without_torchaudio_comfyui_runs_and_nothing_installs_it(comfyui):
    """PyPI's newest does not import beside every torch, and transformers imports it wherever it is installed."""
    finding = findings(comfyui, {**VERSIONS, "torchaudio": None})["its packages"]
    assert finding.status == "warning"
    assert finding.detail == "ComfyUI asks for torchaudio (here: none), which only its audio nodes need"
    assert finding.fix is None


def test_a_comfyui_that_imports_torchaudio_is_given_versions_that_import_together(comfyui):
    code = comfyui / "comfy/ldm/lightricks/vae/audio_vae.py"
    code.parent.mkdir(parents=True)
    code.touch()
    finding = findings(comfyui, {**VERSIONS, "torch": "2.15.0", "torchaudio": None})["its packages"]
    assert (finding.status, finding.detail) == ("blocked", "ComfyUI needs torchaudio, not installed here")
    assert finding.fix is not None
    assert finding.fix.endswith(" torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0")


def test_a_torch_for_which_the_default_index_has_no_torchvision(comfyui):
    """Beside torch 2.13.0+cpu, that index gives a torchvision 0.28.0 that does not import."""
    requirements = comfyui / "requirements.txt"
    finding = findings(comfyui, {**VERSIONS, "torchvision": None})["its packages"]
    assert finding.detail == "ComfyUI needs torchvision, not installed here"
    assert finding.fix == f"{PIP} uninstall -y torch && {PIP} install -r {requirements}"
    finding = findings(comfyui, {**VERSIONS, "torchvision": None, "torch": "2.15.0"})["its packages"]
    assert finding.fix == f"{PIP} install -r {requirements} torch==2.15.0"
    finding = findings(comfyui, {**VERSIONS, "torchvision": None, "torch": None})["its packages"]
    assert finding.fix == f"{PIP} install -r {requirements}"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kornia": None}, "ComfyUI asks for kornia>=0.7.1 (here: none)"),
        ({"torchaudio": None, "kornia": None}, "ComfyUI asks for torchaudio (here: none), kornia>=0.7.1 (here: none)"),
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


def test_an_environment_that_is_not_this_one(comfyui):
    assert own_environment(comfyui) is None
    (comfyui / ".venv").mkdir()
    (comfyui / ".venv" / "pyvenv.cfg").touch()
    assert own_environment(comfyui) == comfyui / ".venv"
    finding = findings(comfyui, environment=comfyui / ".venv")["environment"]
    assert finding.status == "warning"
    assert finding.detail == f"ComfyUI has an environment of its own, {comfyui / '.venv'}; this is /opt/venv"
    python = comfyui / ".venv" / "bin" / "python"
    started = f", or start ComfyUI with {sys.executable}"
    assert finding.fix == f"install comfy-tpu there: uv pip install --python {python} {ROOT}{started}"
    (comfyui / ".venv" / "lib" / "python3.12" / "site-packages" / "pip").mkdir(parents=True)
    finding = findings(comfyui, environment=comfyui / ".venv")["environment"]
    assert finding.fix == f"install comfy-tpu there: {python} -m pip install {ROOT}{started}"
    assert findings(comfyui, environment=Path("/opt/venv"))["environment"].status == "ok"


def test_without_a_requirements_file(tmp_path):
    assert findings(tmp_path)["its packages"].status == "ok"
