"""What the doctor reads off a machine, on file trees and processes made for it."""

import os
from pathlib import Path

import pytest

from comfy_tpu.compiler.cache import cache_directory
from comfy_tpu.config import CacheConfig
from comfy_tpu.diagnosis import device_probe, facts
from comfy_tpu.pipeline import model_files


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def pci(root, address, vendor, kind):
    write(root / "sys/bus/pci/devices" / address / "vendor", f"{vendor}\n")
    write(root / "sys/bus/pci/devices" / address / "class", f"{kind}\n")


def test_hardware_of_a_plain_machine(tmp_path):
    pci(tmp_path, "0000:00:04.0", "0x1ae0", "0x020000")  # Google's network card, on every machine of that cloud
    pci(tmp_path, "0000:00:05.0", "0x1ae0", "0x010802")  # and its disk
    write(tmp_path / "dev/accel/accel0")  # another maker's accelerator
    write(tmp_path / "dev/vfio/vfio")
    assert facts.hardware({}, tmp_path) == facts.Hardware()


def test_hardware_with_accel_files(tmp_path):
    write(tmp_path / "dev/accel0")
    assert facts.hardware({}, tmp_path).tpu == "/dev/accel0"


def test_hardware_with_tpu_on_vfio(tmp_path):
    write(tmp_path / "dev/vfio/0")
    pci(tmp_path, "0000:00:06.0", "0x1ae0", "0xff0000")
    assert facts.hardware({}, tmp_path).tpu == "PCI 0000:00:06.0"


def test_tpu_variables(tmp_path):
    assert facts.hardware({"TPU_NAME": "mine"}, tmp_path).tpu_variable == "TPU_NAME"
    compiling_only = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v6e-8"}
    assert facts.hardware(compiling_only, tmp_path).tpu_variable is None


@pytest.mark.parametrize(
    ("line", "major"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", 550),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", 580),
        ("something else", None),
    ],
)
def test_nvidia(tmp_path, line, major):
    write(tmp_path / "dev/nvidia0")
    write(tmp_path / "proc/driver/nvidia/version", line)
    assert facts.hardware({}, tmp_path) == facts.Hardware(nvidia="/dev/nvidia0", nvidia_driver=major)


def test_host_memory(tmp_path):
    write(tmp_path / "meminfo", "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n")
    assert facts.host_memory(tmp_path / "meminfo") == facts.HostMemory(24_000_000 * 1024, 20_000_000 * 1024)
    assert facts.host_memory(tmp_path / "none").total_bytes > 0


def test_directory(tmp_path):
    write(tmp_path / "xla/jit_f-123-cache", "12345")
    write(tmp_path / "xla/jit_f-123-atime", "1")
    found = facts.directory(tmp_path / "xla", "*-cache")
    assert (found.exists, found.writable, found.entries, found.size_bytes) == (True, True, 1, 6)
    assert found.free_bytes > 0


def test_directory_that_is_not_there_yet(tmp_path):
    found = facts.directory(tmp_path / "a/b/c", "*")
    assert (found.exists, found.writable, found.entries, found.size_bytes) == (False, True, 0, 0)
    assert not (tmp_path / "a").exists()


def test_directory_that_is_a_file(tmp_path):
    write(tmp_path / "file")
    for path in (tmp_path / "file", tmp_path / "file/below"):
        found = facts.directory(path, "*")
        assert (found.exists, found.writable) == (False, False)


def test_model_cache_directory():
    assert facts.model_cache_directory({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert facts.model_cache_directory({"HF_HOME": "/b"}) == Path("/b/hub")
    assert facts.model_cache_directory({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert facts.model_cache_directory({}) == Path.home() / ".cache/huggingface/hub"


def test_compile_cache_directory(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert cache_directory(CacheConfig()).parts[-2:] == ("comfy-tpu", "xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/from/environment")
    assert cache_directory(CacheConfig()) == Path("/from/environment")
    assert cache_directory(CacheConfig(directory=Path("/chosen"))) == Path("/chosen")


def test_requirements_are_those_of_the_project():
    requirements = facts.requirements()
    assert "torch>=2.11" in requirements
    assert not [line for line in requirements if "extra" in line]
    assert facts.python().required == ">=3.11"


def test_versions():
    assert facts.versions(["pytest", "no-such-package"]) == {"pytest": pytest.__version__, "no-such-package": None}


def test_importing_is_tried_elsewhere():
    assert facts.import_error(["json", "email"]) is None
    assert facts.import_error(["json", "no_such_module"]) == "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.thorough  # by default: importing is tried elsewhere, above
def test_torchvision_of_another_torch(tmp_path, monkeypatch):
    """As torchvision 0.28.0 of PyPI fails beside torch 2.13.0+cpu, with every requirement met."""
    write(tmp_path / "torch.py")
    write(tmp_path / "torchvision.py", "raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error = "RuntimeError: operator torchvision::nms does not exist"
    versions = {"torchvision": "0.28.0", "torchaudio": None}
    monkeypatch.setattr(facts, "_version", versions.get)
    none = facts.TorchExtension(None)
    assert facts.torch_extensions() == {"torchvision": facts.TorchExtension("0.28.0", error), "torchaudio": none}
    write(tmp_path / "torchvision.py")
    assert facts.torch_extensions() == {"torchvision": facts.TorchExtension("0.28.0"), "torchaudio": none}
    versions["torchaudio"] = "2.11.0"
    write(tmp_path / "torchaudio.py", "raise RuntimeError('compiled with different CUDA versions')")
    assert facts.torch_extensions() == {
        "torchvision": facts.TorchExtension("0.28.0"),
        "torchaudio": facts.TorchExtension("2.11.0", "RuntimeError: compiled with different CUDA versions"),
    }


def test_where_torch_is_alone_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(facts, "_version", lambda name: None)
    monkeypatch.setattr(facts, "import_error", lambda names: pytest.fail("imported"))
    assert set(facts.torch_extensions().values()) == {facts.TorchExtension(None)}


@pytest.fixture
def fake_jax(tmp_path, monkeypatch):
    """Puts a jax of the given source before the real one, for the probe's process only."""

    def install(source):
        write(tmp_path / "jax.py", source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def test_devices_when_jax_cannot_start(fake_jax):
    fake_jax("def local_devices(): raise RuntimeError('no TPU for you')")
    found = facts.devices()
    assert found.platform is None
    assert found.error == "RuntimeError: no TPU for you"


@pytest.mark.thorough  # by default: JAX that cannot start, above
def test_devices_hears_why_an_accelerator_was_passed_over(fake_jax):
    fake_jax(
        "import logging\n"
        "class D: id = 0; device_kind = 'cpu'; platform = 'cpu'; memory_stats = lambda self: None\n"
        "def local_devices():\n"
        "    logging.getLogger('jax._src.xla_bridge').info('backend %s: held', 'tpu')\n"
        "    print('noise')\n"
        "    return [D()]\n"
    )
    found = facts.devices()
    assert (found.platform, found.messages) == ("cpu", ("backend tpu: held",))


def test_devices_when_jax_crashes(fake_jax):
    fake_jax("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert facts.devices().error.startswith("JAX was ended by SIGSEGV while starting")


def test_devices_when_jax_hangs(fake_jax):
    fake_jax("import time; time.sleep(60)")
    assert facts.devices(timeout_s=0.5).error == "JAX was still starting after 0 s"


@pytest.mark.slow  # by default: the command, tests/cli/test_doctor.py
def test_devices_opens_the_demo_models_and_leaves_no_trace_in_this_process():
    before = dict(os.environ)
    found = facts.devices(timeout_s=900)
    assert len(found.devices) == 8
    assert found.demo_models == {"demo": None, "demo-image": None}
    assert dict(os.environ) == before


def test_the_probe_says_which_demo_model_cannot_be_opened(tmp_path, monkeypatch):
    """As the wheel was, in which the demo model lacked what demo-image had."""
    monkeypatch.setattr(model_files, "DEMO_DIRECTORIES", {"demo": tmp_path, "demo-image": model_files.DEMO_DIRECTORY})
    source = model_files.DEMO_DIRECTORY
    for name in ("model_index.json", "transformer/config.json"):
        write(tmp_path / name, (source / name).read_text())
    found = device_probe._open_demo_models()
    assert found["demo"].startswith("model=demo lacks text_encoder, vae, tokenizer; a WanPipeline directory has")
    assert found["demo-image"] is None


def test_a_library_that_does_not_import_is_told_for_each_demo_model(monkeypatch):
    """As diffusers beside a torchvision of another torch, which raises when a class is looked up."""

    def fail(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(model_files.ModelFiles, "open", fail)
    assert device_probe._open_demo_models() == dict.fromkeys(
        ("demo", "demo-image"), "operator torchvision::nms does not exist"
    )
