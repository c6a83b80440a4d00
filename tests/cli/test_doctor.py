"""The doctor on machines it is told about, and once on this one."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_tpu.cli import doctor
from comfy_tpu.cli.main import main
from comfy_tpu.diagnosis import Probes, examination, examine, facts
from comfy_tpu.diagnosis.tested_versions import find_bounds
from comfy_tpu.parallel.tpu_holders import TpuHolder

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CACHE = facts.Directory("/home/u/.cache/comfy-tpu/xla", True, True, 3, 5 * GIB, 100 * GIB)
DEMOS = {"demo": None, "demo-image": None}
CPU = facts.Devices("cpu", (facts.Device(0, "cpu", None),), demo_models=DEMOS)
TPU = facts.Devices("tpu", tuple(facts.Device(i, "TPU v6 lite", 32 * GIB) for i in range(8)), demo_models=DEMOS)
PIP = f"{sys.executable} -m pip"
NEWER_PYTHON = "let uv bring a newer one, and install comfy-tpu there: uv venv --seed --python 3.12"
BOUNDS = find_bounds(("torch", "jax", "torchax"))
VERSIONS = {"torch": "2.13.0+cpu", "jax": "0.10.2", "torchax": "0.0.13", "jaxlib": "0.10.2"}
pytestmark = pytest.mark.usefixtures("with_pip")
UNSTARTED = "Unable to initialize backend 'tpu': too old"
NO_NMS = "RuntimeError: operator torchvision::nms does not exist"
HELD = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 4711. Not attempting"


def machine(versions=VERSIONS, python="3.11.7", **fixed):
    """Probes of a machine on which all is well, but for what the test says."""
    values = {
        "python": facts.Python(python, "/usr/bin/python3", ">=3.11"),
        "requirements": ("torch>=2.11", "jax>=0.10.2", "torchax>=0.0.13"),
        "devices": TPU,
        "torch_extensions": {name: facts.TorchExtension(versions.get(name)) for name in ("torchvision", "torchaudio")},
        "hardware": facts.Hardware(tpu="/dev/accel0"),
        "host_memory": facts.HostMemory(400 * GIB, 300 * GIB),
        "compile_cache": CACHE,
        "model_cache": dataclasses.replace(CACHE, path="/home/u/.cache/huggingface/hub"),
        **fixed,
    }
    probes = {name: lambda value=value: value for name, value in values.items()}
    return Probes(**probes, versions=lambda names: {name: versions.get(name) for name in names})


def findings(probes):
    return {finding.name: finding for finding in examine(probes).findings}


def test_healthy_machine():
    report = examine(machine())
    assert not report.blocked
    assert {finding.status for finding in report.findings} == {"ok"}
    assert doctor.as_text(report, "utf-8").splitlines() == [
        "comfy-tpu 0.1.0",
        "",
        "✓ python         3.11.7 (/usr/bin/python3)",
        "✓ torch          2.13.0+cpu",
        "✓ jax            0.10.2",
        "✓ torchax        0.0.13",
        "✓ devices        tpu: 8 x TPU v6 lite, 32.0 GiB each",
        "✓ tracing        torchax 0.0.13, torch 2.13.0+cpu, jax 0.10.2 work together",
        "✓ demo models    demo, demo-image",
        "✓ host memory    300.0 GiB free of 400.0 GiB",
        "✓ compile cache  /home/u/.cache/comfy-tpu/xla (3 programs, 5.0 GiB; 100.0 GiB free on the disk)",
        "✓ model cache    /home/u/.cache/huggingface/hub (3 models, 5.0 GiB; 100.0 GiB free on the disk)",
        "",
        "Also here: jaxlib 0.10.2.",
        "",
        "Ready.",
    ]


ACCEL = facts.Hardware(tpu="/dev/accel0")
H200 = facts.Hardware(nvidia="/dev/nvidia0", nvidia_driver=580)

BLOCKING = {
    "old python": (machine(python="3.10.2"), "python", "needs >=3.11", NEWER_PYTHON),
    "old torch": (
        machine({**VERSIONS, "torch": "2.9.1+cu128"}),
        "torch",
        "2.9.1+cu128 is too old; needs >=2.11",
        f"{PIP} install 'torch>=2.11'",
    ),
    # Without torchvision in the command pip leaves the one that needs torch 2.9.1.
    "old torch and its torchvision": (
        machine({**VERSIONS, "torch": "2.9.1", "torchvision": "0.24.1"}),
        "torch",
        "2.9.1 is too old; needs >=2.11",
        f"{PIP} install 'torch>=2.11' torchvision",
    ),
    "old jax": (machine({**VERSIONS, "jax": "0.9.2"}), "jax", "0.9.2 is too old", f"{PIP} install 'jax>=0.10.2'"),
    "no torchax": (
        machine({**VERSIONS, "torchax": None}),
        "torchax",
        "not installed; needs >=0.0.13",
        f"{PIP} install 'torchax>=0.0.13'",
    ),
    "TPU without libtpu": (
        machine(devices=CPU),
        "tpu",
        "there is a TPU (/dev/accel0) but JAX sees only the cpu",
        f"{PIP} install 'jax[tpu]'",
    ),
    "TPU with a libtpu that does not start": (
        machine({**VERSIONS, "libtpu": "0.0.30"}, devices=dataclasses.replace(CPU, messages=(UNSTARTED,))),
        "tpu",
        "there is a TPU (/dev/accel0) but JAX sees only the cpu: Unable to initialize backend 'tpu': too old",
        f"{PIP} uninstall -y libtpu && {PIP} install 'jax[tpu]'",
    ),
    "TPU held, JAX fell back": (
        machine(devices=dataclasses.replace(CPU, messages=(HELD,))),
        "devices",
        "the TPU is held by process 4711",
        "end that process: kill 4711",
    ),
    "TPU held, JAX gave up": (
        machine(devices=facts.Devices(None, error=f"RuntimeError: {HELD}")),
        "devices",
        "the TPU is held by process 4711",
        "end that process: kill 4711",
    ),
    "TPU held, and by whom is known": (
        machine(devices=dataclasses.replace(CPU, holders=(TpuHolder(4711, "python main.py", "anna"),))),
        "devices",
        "the TPU is held by process 4711 (python main.py, user anna)",
        "end that process: kill 4711",
    ),
    "stale lock file": (
        machine(devices=facts.Devices(None, error="RuntimeError: ABORTED: Internal error: /tmp/libtpu_lockfile")),
        "devices",
        "the TPU is held by another process",
        "end the other process, or if there is none: rm /tmp/libtpu_lockfile",
    ),
    "JAX asked for what is not there": (
        machine(
            hardware=facts.Hardware(),
            devices=facts.Devices(None, requested="tpu", error="RuntimeError: Unable to initialize backend 'tpu': no"),
        ),
        "devices",
        "Unable to initialize backend 'tpu'",
        "unset JAX_PLATFORMS",
    ),
    "JAX hangs": (
        machine(devices=facts.Devices(None, error="JAX was still starting after 120 s")),
        "devices",
        "still starting",
        "on one host of a TPU pod, run the command on all of its hosts at once",
    ),
    "JAX broken": (
        machine(devices=facts.Devices(None, error="ImportError: jaxlib is version 0.9, but jax needs 0.10")),
        "devices",
        "ImportError: jaxlib is version 0.9",
        f"{PIP} uninstall -y jax jaxlib && {PIP} install jax==0.10.2",
    ),
    "a variable that JAX refuses": (
        machine(devices=facts.Devices(None, error="JAX exited with status 1: Unknown flag in XLA_FLAGS: --nonsense")),
        "devices",
        "Unknown flag in XLA_FLAGS: --nonsense",
        "unset XLA_FLAGS",
    ),
    "torchax broken": (
        machine(devices=dataclasses.replace(TPU, tracing="AttributeError: aten.prod has no overload 'dim_Dimname'")),
        "tracing",
        "torchax 0.0.13, torch 2.13.0+cpu, jax 0.10.2 do not work together: AttributeError: aten.prod",
        f"{PIP} uninstall -y torch torchax && {PIP} install torch==2.13.0+cpu torchax==0.0.13 "
        "--extra-index-url https://download.pytorch.org/whl/cpu",
    ),
    "versions that no test ran with": (
        machine(
            {**VERSIONS, "torch": "2.17.0", "torchvision": "0.32.0"},
            devices=dataclasses.replace(TPU, tracing="AttributeError: aten.prod has no overload 'dim_Dimname'"),
        ),
        "tracing",
        "torchax 0.0.13, torch 2.17.0, jax 0.10.2 do not work together: AttributeError: aten.prod",
        f"{PIP} install {' '.join(repr(name + bounds) for name, bounds in BOUNDS.items())} torchvision",
    ),
    "torchvision of another torch": (
        machine(
            {**VERSIONS, "torch": "2.15.0"}, torch_extensions={"torchvision": facts.TorchExtension("0.26.0", NO_NMS)}
        ),
        "torchvision",
        f"torch 2.15.0 and torchvision 0.26.0 do not import together: {NO_NMS}",
        f"{PIP} uninstall -y torchvision && {PIP} install torch==2.15.0 torchvision",
    ),
    # All requirements are met: `pip install torchvision`, with or without a version, finds nothing to do.
    "torchvision of another build": (
        machine(torch_extensions={"torchvision": facts.TorchExtension("0.28.0", NO_NMS)}),
        "torchvision",
        f"torch 2.13.0+cpu and torchvision 0.28.0 do not import together: {NO_NMS} "
        "(torchvision for this build of torch: https://download.pytorch.org/whl/cpu)",
        f"{PIP} uninstall -y torch torchvision && {PIP} install torch torchvision",
    ),
    "torchaudio of another torch": (
        machine(
            {**VERSIONS, "torch": "2.15.0"},
            torch_extensions={"torchaudio": facts.TorchExtension("2.11.0", "RuntimeError: different CUDA versions")},
        ),
        "torchaudio",
        "torch 2.15.0 and torchaudio 2.11.0 do not import together: RuntimeError: different CUDA versions",
        f"{PIP} uninstall -y torch torchvision torchaudio"
        f" && {PIP} install torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0",
    ),
    "torchaudio of PyPI with a torch that is not PyPI's": (
        machine(torch_extensions={"torchaudio": facts.TorchExtension("2.11.0", "OSError: could not load")}),
        "torchaudio",
        "torch 2.13.0+cpu and torchaudio 2.11.0 do not import together: OSError: could not load "
        "(torchaudio for this build of torch: https://download.pytorch.org/whl/cpu)",
        f"{PIP} uninstall -y torchaudio"
        f" && {PIP} install torchaudio==2.11.0 --index-url https://download.pytorch.org/whl/cpu",
    ),
    "demo models incomplete": (
        machine(
            devices=dataclasses.replace(
                TPU,
                demo_models={
                    "demo": "model=demo lacks vae, tokenizer; a WanPipeline directory has …",
                    "demo-image": "model=demo-image lacks vae; a WanImageToVideoPipeline directory has …",
                },
            )
        ),
        "demo models",
        "model=demo lacks vae, tokenizer; model=demo-image lacks vae",
        f"git -C {ROOT} checkout -- src/comfy_tpu/assets",
    ),
}

WARNING = {
    "TPU hidden on purpose": (
        machine(devices=dataclasses.replace(CPU, requested="cpu")),
        "tpu",
        "JAX_PLATFORMS=cpu hides it",
        "unset JAX_PLATFORMS",
    ),
    "TPU variables without a TPU": (
        machine(devices=CPU, hardware=facts.Hardware(tpu_variable="TPU_NAME")),
        "tpu",
        "TPU_NAME is set but this system shows no TPU",
        "give the container the device: docker run --privileged --net=host",
    ),
    "GPU without a plugin": (
        machine(devices=CPU, hardware=H200),
        "gpu",
        "there is an NVIDIA GPU (/dev/nvidia0, driver 580) but JAX sees only the cpu",
        f"{PIP} install 'jax[cuda13]'",
    ),
    "GPU with a plugin that does not start": (
        machine(
            {**VERSIONS, "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"},
            devices=dataclasses.replace(CPU, messages=("Unable to initialize backend 'cuda': no",)),
            hardware=H200,
        ),
        "gpu",
        "but JAX sees only the cpu: Unable to initialize backend 'cuda': no",
        f"{PIP} uninstall -y jax-cuda13-plugin jax-cuda13-pjrt && {PIP} install 'jax[cuda13]'",
    ),
    "GPU with an older driver": (
        machine(devices=CPU, hardware=dataclasses.replace(H200, nvidia_driver=550)),
        "gpu",
        "driver 550",
        f"{PIP} install 'jax[cuda12]'",
    ),
    "GPU hidden on purpose": (
        machine(devices=dataclasses.replace(CPU, requested="cpu"), hardware=H200),
        "gpu",
        "JAX_PLATFORMS=cpu hides it",
        "unset JAX_PLATFORMS",
    ),
    "cache cannot be written": (
        machine(compile_cache=dataclasses.replace(CACHE, writable=False)),
        "compile cache",
        "/home/u/.cache/comfy-tpu/xla cannot be written: every process compiles anew",
        "export JAX_COMPILATION_CACHE_DIR=/a/writable/directory",
    ),
    "disk full": (
        machine(compile_cache=dataclasses.replace(CACHE, free_bytes=GIB // 2)),
        "compile cache",
        "512.0 MiB free on the disk",
        "export JAX_COMPILATION_CACHE_DIR=/a/writable/directory",
    ),
    "model cache cannot be written": (
        machine(model_cache=dataclasses.replace(CACHE, writable=False)),
        "model cache",
        "cannot be written",
        "export HF_HOME=/a/writable/directory",
    ),
}


@pytest.mark.parametrize(
    ("case", "status"), [(case, "blocked") for case in BLOCKING] + [(case, "warning") for case in WARNING]
)
def test_problem(case, status, monkeypatch, capsys):
    probes, name, detail, fix = {**BLOCKING, **WARNING}[case]
    finding = findings(probes)[name]
    assert finding.status == status
    assert detail in finding.detail
    assert finding.fix == fix
    others = {other.status for other in findings(probes).values() if other.name != name}
    assert others == {"ok"}

    monkeypatch.setattr(doctor, "examine", lambda **_: examine(probes))
    assert doctor.run(argparse.Namespace(json=False, model=None, ignore_config_key=[])) == (
        1 if status == "blocked" else 0
    )
    assert f"fix: {fix}" in capsys.readouterr().out


def test_cpu_alone_is_fine():
    report = examine(machine(devices=CPU, hardware=facts.Hardware()))
    assert {finding.status for finding in report.findings} == {"ok"}


def test_one_command_mends_torchvision_and_torchaudio():
    """And the demo models, which nothing of diffusers opens before: to restore their files would not help."""
    found = findings(
        machine(
            {**VERSIONS, "torch": "2.15.0"},
            torch_extensions={
                "torchvision": facts.TorchExtension("0.28.0", NO_NMS),
                "torchaudio": facts.TorchExtension("2.11.0", "OSError: could not load"),
            },
            devices=dataclasses.replace(TPU, demo_models={"demo": NO_NMS}),
        )
    )
    assert "demo models" not in found
    together = "torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0"
    fix = f"{PIP} uninstall -y torch torchvision torchaudio && {PIP} install {together}"
    assert found["torchvision"].fix == found["torchaudio"].fix == fix


def test_torchvision_that_works_is_shown():
    finding = findings(machine({**VERSIONS, "torchvision": "0.28.0"}))["torchvision"]
    assert (finding.status, finding.detail) == ("ok", "torch 2.13.0+cpu and torchvision 0.28.0 work together")
    assert "torchvision" not in findings(machine({**VERSIONS, "torchvision": "0.28.0", "torch": None}))


def test_torch_newer_than_any_we_know_is_fine():
    assert findings(machine({**VERSIONS, "torch": "2.16.0.dev20270101+cu130"}))["torch"].status == "ok"


@pytest.mark.parametrize("probe", [field.name for field in dataclasses.fields(Probes)])
def test_probe_that_raises_becomes_a_finding(probe):
    def broken(*_):
        raise PermissionError("not for you")

    report = examine(dataclasses.replace(machine(), **{probe: broken}))
    (finding,) = [finding for finding in report.findings if finding.status != "ok"]
    assert finding.status == "warning"
    assert finding.detail == "could not be checked: PermissionError: not for you"
    json.loads(doctor.as_json(report))
    assert "not for you" in doctor.as_text(report, "utf-8")


def test_check_that_raises_becomes_a_finding(monkeypatch):
    def broken(devices, versions):
        raise KeyError("kind")

    monkeypatch.setattr(examination.checks, "check_devices", broken)
    assert findings(machine())["devices"].detail == "could not be checked: KeyError: 'kind'"


def test_text_without_unicode():
    text = doctor.as_text(examine(machine(python="3.10.2")), "ascii")
    assert text.isascii()
    assert "\nx python         3.10.2" in text
    assert "\n+ torch          2.13.0+cpu" in text


def test_verdict_counts():
    text = doctor.as_text(examine(machine({}, devices=CPU)), "utf-8")
    assert text.endswith("Not ready: 4 to mend first, 0 more to look at.")
    text = doctor.as_text(examine(WARNING["disk full"][0]), "utf-8")
    assert text.endswith("Ready, with 1 to look at.")


KEYS = {
    "": "schema blocked python versions devices torch_extensions hardware host_memory compile_cache model_cache "
    "findings model hosts",
    "python": "version executable required",
    "devices": "platform devices requested messages error tracing demo_models holders",
    "torch_extensions": "torchvision torchaudio",
    "hardware": "tpu tpu_variable nvidia nvidia_driver",
    "host_memory": "total_bytes available_bytes",
    "compile_cache": "path exists writable entries size_bytes free_bytes",
    "model_cache": "path exists writable entries size_bytes free_bytes",
}


def check_document(document):
    for part, keys in KEYS.items():
        assert set(document[part] if part else document) == set(keys.split())
    assert document["schema"] == 1
    assert {"comfy-tpu", "torch", "jax", "jaxlib", "torchax", "libtpu", "torchvision"} <= set(document["versions"])
    for extension in document["torch_extensions"].values():
        assert set(extension) == {"version", "error"}
    for device in document["devices"]["devices"]:
        assert set(device) == {"id", "kind", "memory_bytes"}
    for finding in document["findings"]:
        assert set(finding) == {"name", "status", "detail", "fix"}
        assert finding["status"] in ("ok", "warning", "blocked")
    assert document["blocked"] == any(finding["status"] == "blocked" for finding in document["findings"])


def test_json_keys():
    check_document(json.loads(doctor.as_json(examine(machine()))))
    for key in KEYS:
        if key:
            assert f"    {key}" in doctor.__doc__


@pytest.mark.parametrize("flags", [[], pytest.param(["--model", "demo"], marks=pytest.mark.slow)], ids=" ".join)
def test_real_command(tmp_path, flags):
    cache = tmp_path / "xla"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-m", "comfy_tpu.cli", "doctor", "--json", *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    document = json.loads(done.stdout)
    check_document(document)
    assert done.returncode == document["blocked"] == 0
    assert document["devices"]["platform"] == "cpu"
    assert document["devices"]["demo_models"] == {"demo": None, "demo-image": None}
    assert len(document["devices"]["devices"]) == 8
    assert document["compile_cache"]["path"] == str(cache)
    assert not cache.exists(), "looking must not leave anything behind"
    if not flags:
        assert document["model"] is None
        return
    model = document["model"]
    assert (model["family"], model["mesh"], model["error"], model["incomplete"]) == (
        *("Wan 2.1", "dp=2,sp=4,tp=1", None, None),
    )
    for component in model["components"]:
        assert component["bytes_on_disk"] > 0
        assert component["sharding"]["total"]["tensors"] > 0
    assert model["needed_bytes"] < model["usable_bytes"]


SHARDING = {
    "mesh": {"dp": 2, "sp": 4, "tp": 1},
    "sharded": {"tensors": 1, "nbytes": 10**9, "bytes_per_device": 10**9 // 8},
    "gathered": {"tensors": 17, "nbytes": 28 * 10**9, "bytes_per_device": 7 * 10**9},
    "replicated": {"tensors": 25, "nbytes": 13 * 10**6, "bytes_per_device": 13 * 10**6},
    "total": {"tensors": 43, "nbytes": 29_013 * 10**6, "bytes_per_device": 7_138 * 10**6},
    "could_not_split": ["patch.weight"],
}
MODEL = facts.ModelFacts(
    name="some/model",
    family="Wan 2.1",
    directory="/models/wan",
    error=None,
    incomplete=None,
    size="1280x720x81",
    mesh="dp=2,sp=4,tp=1",
    components=(facts.ModelComponent("transformer", 28 * 10**9, SHARDING), facts.ModelComponent("vae", 10**6, None)),
    needed_bytes=9_570 * 10**6,
    usable_bytes=28_800 * 10**6,
)


def model_report(**changed):
    model = dataclasses.replace(MODEL, **changed)
    return examine(machine(), model="some/model", look_at_model=lambda name, devices, memory: model)


def test_a_model_that_would_run():
    report = model_report()
    assert not report.blocked
    assert doctor.as_text(report, "utf-8").splitlines()[-8:-4] == [
        "✓ model          some/model is Wan 2.1",
        "✓ model files    complete in /models/wan: transformer 28.0 GB, vae 1 MB; 28.0 GB in all",
        "✓ model memory   9.57 GB of a device at 1280x720x81 on mesh dp=2,sp=4,tp=1, 28.8 GB usable",
        "✓ transformer    mesh dp=2,sp=4,tp=1: 43 tensors, 29.0 GB, 7.14 GB of it on each device; 1 split (1 GB), "
        "17 stored in pieces and gathered (28.0 GB), 25 replicated (13 MB); could not be split, because no dimension "
        "divides: patch.weight",
    ]
    document = json.loads(doctor.as_json(report))
    assert document["model"]["components"][0] == {
        "name": "transformer",
        "bytes_on_disk": 28 * 10**9,
        "sharding": SHARDING,
    }
    for key in document["model"]:
        assert key in doctor.__doc__


@pytest.mark.parametrize(
    ("changed", "name", "status", "detail", "fix"),
    [
        (
            {"family": None, "error": "some/model is not on this machine"},
            "model",
            "blocked",
            "some/model is not on this machine",
            "give a directory in diffusers' layout, the hub id of a published model, or demo",
        ),
        (
            {"incomplete": "model=some/model lacks vae;\n  it has …"},
            "model files",
            "blocked",
            "model=some/model lacks vae; it has …",
            "download the model again",
        ),
        (
            {"directory": None},
            "model files",
            "warning",
            "not on this machine",
            "download it with its first run: comfy-tpu generate PROMPT --model some/model",
        ),
        (
            {"needed_bytes": 33 * 10**9},
            "model memory",
            "blocked",
            "it does not fit: 33.0 GB of a device at 1280x720x81 on mesh dp=2,sp=4,tp=1, 28.8 GB usable",
            "choose a smaller size, or more chips: comfy-tpu plan some/model --tpu v6e-8",
        ),
    ],
)
def test_a_model_that_would_not(changed, name, status, detail, fix):
    report = model_report(**changed)
    (finding,) = [finding for finding in report.findings if finding.status != "ok"]
    assert (finding.name, finding.status, finding.detail, finding.fix) == (name, status, detail, fix)
    assert report.blocked == (status == "blocked")


def test_a_look_at_a_model_that_fails_is_a_finding():
    def fail(*_):
        raise TimeoutError("still looking")

    report = examine(machine(), model="x", look_at_model=fail)
    assert report.findings[-1].detail == "could not be checked: TimeoutError: still looking"
    assert report.model is None


def test_keys_to_ignore_reach_the_look_at_a_model(monkeypatch):
    def look(name, devices, memory, *, ignored_keys):
        assert ignored_keys == ["shiny", "dull"]
        return MODEL

    monkeypatch.setattr(facts, "model", look)
    monkeypatch.setattr(doctor, "examine", lambda **options: examine(machine(), **options))
    assert main(["doctor", "--model", "x", "--ignore-config-key", "shiny", "--ignore-config-key", "dull"]) == 0


def test_an_empty_model(capsys):
    assert main(["doctor", "--model", ""]) == 1
    assert capsys.readouterr() == ("", "comfy-tpu: --model is empty; give a path\n")
