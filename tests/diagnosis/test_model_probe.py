"""What the doctor says of a model on devices that are described to it. tests/cli/test_doctor.py has the command."""

import json
import shutil
import sys
import types

import pytest

from comfy_tpu.diagnosis import facts
from comfy_tpu.diagnosis.model_probe import probe
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY

CPU = {"platform": "cpu", "kind": "cpu", "device_count": 1, "memory_bytes": 10**9}
V6E = {"platform": "tpu", "kind": "TPU v6 lite", "memory_bytes": None}


@pytest.fixture
def demo(tmp_path):
    return shutil.copytree(DEMO_DIRECTORY, tmp_path / "demo")


@pytest.mark.default_cases("1-False")
@pytest.mark.parametrize(("count", "fits"), [(8, True), (1, False)])
def test_a_published_model_that_is_not_here(count, fits):
    found = facts.parse_model(probe("Wan-AI/Wan2.1-T2V-14B-Diffusers", **V6E, device_count=count))
    assert (found.family, found.directory, found.error) == ("Wan 2.1", None, None)
    (transformer,) = found.components
    assert transformer.bytes_on_disk is None
    assert transformer.sharding["total"]["nbytes"] == pytest.approx(28.6e9, rel=0.01)
    assert (found.needed_bytes <= found.usable_bytes) == fits
    assert found.mesh == ("dp=2,sp=4,tp=1" if fits else "dp=1,sp=1,tp=1")


def test_a_directory_that_is_complete(demo):
    found = probe(str(demo), **CPU)
    assert (found["family"], found["directory"], found["incomplete"]) == ("Wan 2.1", str(demo), None)
    assert [entry["name"] for entry in found["components"]] == ["text_encoder", "transformer", "vae"]
    weights = [path for path in demo.glob("*/*.safetensors") if path.parent.name != "lora"]
    assert sum(entry["bytes_on_disk"] for entry in found["components"]) == sum(path.stat().st_size for path in weights)
    assert found["needed_bytes"] == max(e["sharding"]["total"]["bytes_per_device"] for e in found["components"])
    assert found["usable_bytes"] == 850_000_000


def test_weights_that_are_missing_or_another_models(demo):
    (weights,) = (demo / "vae").glob("*.safetensors")
    content = weights.read_bytes()
    weights.unlink()
    found = probe(str(demo), **CPU)
    assert "the weights of its vae cannot be used" in found["incomplete"]
    assert found["components"][2]["sharding"]["total"]["tensors"] > 0
    weights.write_bytes(content)
    config = json.loads((demo / "transformer/config.json").read_text())
    (demo / "transformer/config.json").write_text(json.dumps({**config, "ffn_dim": config["ffn_dim"] * 2}))
    found = probe(str(demo), **CPU)
    assert found["incomplete"].startswith("transformer: checkpoint ")


def test_keys_to_ignore_are_left_out(demo):
    path = demo / "transformer/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shiny": True}))
    assert "has shiny, which " in probe(str(demo), **CPU)["error"]
    found = probe(str(demo), **CPU, ignored_keys=["shiny"])
    assert (found["error"], found["incomplete"], found["family"]) == (None, None, "Wan 2.1")


def test_the_process_that_looks_gets_the_devices_and_its_answer_is_read(monkeypatch):
    def run(command, *, env, input, **_):
        assert command == [sys.executable, "-P", "-m", "comfy_tpu.diagnosis.model_probe"]
        assert env["JAX_PLATFORMS"] == "cpu"
        asked = json.loads(input)
        assert asked["ignored_keys"] == ["shiny"]
        answer = json.dumps(probe(asked.pop("model"), **asked))
        return types.SimpleNamespace(returncode=0, stdout=f"noise\n{answer}\n", stderr="")

    monkeypatch.setattr(facts.subprocess, "run", run)
    devices = facts.Devices("cpu", tuple(facts.Device(number, "cpu", None) for number in range(8)))
    found = facts.model("demo", devices, facts.HostMemory(16 * 10**9, None), ignored_keys=("shiny",))
    assert (found.family, found.mesh, found.incomplete) == ("Wan 2.1", "dp=2,sp=4,tp=1", None)
    assert found.usable_bytes == 1_700_000_000
    failed = types.SimpleNamespace(returncode=-9, stdout="", stderr="one\nout of memory\n")
    monkeypatch.setattr(facts.subprocess, "run", lambda *_, **__: failed)
    error = facts.model("demo", devices, None).error
    assert error == "the process that looked at it was ended by SIGKILL: out of memory"


def test_what_is_no_model(tmp_path):
    assert "is not on this machine" in probe("nobody/knows-it", **CPU)["error"]
    assert "model_index.json does not exist" in probe(str(tmp_path), **CPU)["error"]


def test_devices_that_did_not_start(demo):
    found = probe(str(demo), platform=None, kind="", device_count=0, memory_bytes=None)
    assert (found["family"], found["incomplete"], found["mesh"]) == ("Wan 2.1", None, None)
    assert all(entry["bytes_on_disk"] and entry["sharding"] is None for entry in found["components"])
