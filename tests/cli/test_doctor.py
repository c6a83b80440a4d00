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
from comfy_tpu.diagnosis import Probes, examination, examine, facts

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CACHE = facts.Directory("/home/u/.cache/comfy-tpu/xla", True, True, 3, 5 * GIB, 100 * GIB)
CPU = facts.Devices("cpu", (facts.Device(0, "cpu", None),))
TPU = facts.Devices("tpu", tuple(facts.Device(i, "TPU v6 lite", 32 * GIB) for i in range(8)))
VERSIONS = {"torch": "2.13.0+cpu", "jax": "0.10.2", "torchax": "0.0.13", "jaxlib": "0.10.2"}
HELD = "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 4711. Not attempting"


def machine(versions=VERSIONS, python="3.11.7", **fixed):
    """Probes of a machine on which all is well, but for what the test says."""
    values = {
        "python": facts.Python(python, "/usr/bin/python3", ">=3.11"),
        "requirements": ("torch>=2.11", "jax>=0.10", "torchax>=0.0.13"),
        "devices": TPU,
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
    "old python": (machine(python="3.10.2"), "python", "needs >=3.11", "install Python >=3.11 and comfy-tpu with it"),
    "old torch": (
        machine({**VERSIONS, "torch": "2.9.1+cu128"}),
        "torch",
        "2.9.1+cu128 is too old; needs >=2.11",
        'pip install "torch>=2.11"',
    ),
    "old jax": (machine({**VERSIONS, "jax": "0.9.2"}), "jax", "0.9.2 is too old", 'pip install "jax>=0.10"'),
    "no torchax": (
        machine({**VERSIONS, "torchax": None}),
        "torchax",
        "not installed; needs >=0.0.13",
        'pip install "torchax>=0.0.13"',
    ),
    "TPU without libtpu": (
        machine(devices=CPU),
        "tpu",
        "there is a TPU (/dev/accel0) but JAX sees only the cpu",
        'pip install "jax[tpu]"',
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
        "pip install --upgrade jax",
    ),
    "torchax broken": (
        machine(devices=dataclasses.replace(TPU, tracing="AttributeError: aten.prod has no overload 'dim_Dimname'")),
        "tracing",
        "torchax 0.0.13, torch 2.13.0+cpu, jax 0.10.2 do not work together: AttributeError: aten.prod",
        "pip install --upgrade torchax comfy-tpu",
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
        'pip install "jax[cuda13]"',
    ),
    "GPU with an older driver": (
        machine(devices=CPU, hardware=dataclasses.replace(H200, nvidia_driver=550)),
        "gpu",
        "driver 550",
        'pip install "jax[cuda12]"',
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

    monkeypatch.setattr(doctor, "examine", lambda: examine(probes))
    assert doctor.run(argparse.Namespace(json=False)) == (1 if status == "blocked" else 0)
    assert f"fix: {fix}" in capsys.readouterr().out


def test_cpu_alone_is_fine():
    report = examine(machine(devices=CPU, hardware=facts.Hardware()))
    assert {finding.status for finding in report.findings} == {"ok"}


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
    def broken(devices):
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
    "": "schema blocked python versions devices hardware host_memory compile_cache model_cache findings",
    "python": "version executable required",
    "devices": "platform devices requested messages error tracing",
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


def test_real_command(tmp_path):
    cache = tmp_path / "xla"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-m", "comfy_tpu.cli", "doctor", "--json"],
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
    assert len(document["devices"]["devices"]) == 8
    assert document["compile_cache"]["path"] == str(cache)
    assert not cache.exists(), "looking must not leave anything behind"
