"""XLA_FLAGS and LIBTPU_INIT_ARGS that would end the process."""

import subprocess
import types

import pytest

from comfy_tpu.cli.main import main
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.parallel import runtime_flags
from comfy_tpu.parallel.mesh import find_devices
from comfy_tpu.parallel.runtime_flags import check_runtime_flags


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--xla_dump_to=/tmp --nonsense", "Unknown flag in XLA_FLAGS: --nonsense"),
        ("nonsense", 'Could not open file "nonsense" to read flags for environment variable "XLA_FLAGS"'),
        (
            "--xla_backend_optimization_level=abc",
            "Couldn't interpret value abc for flag xla_backend_optimization_level",
        ),
    ],
)
def test_flags_that_xla_refuses_are_a_sentence(flags: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(InvalidValueError) as caught:
        find_devices("cpu")
    assert str(caught.value) == (
        f"XLA_FLAGS in the environment would end the process ({reason}); correct it or unset it"
    )


def test_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp --nonsense")
    for words in (["generate", "a red circle"], ["plan", "demo", "--tpu", "v6e-1"], ["port", "ops", "torch.nn:Linear"]):
        assert main(words) == 1
        assert "(Unknown flag in XLA_FLAGS: --nonsense); correct it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", ["", "  ", "--xla_force_host_platform_device_count=8  --xla_backend_optimization_level=0"]
)
def test_usual_flags_start_no_process(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **more: pytest.fail("a process was started"))
    check_runtime_flags()


def test_flags_that_xla_takes_pass_and_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_dump_to=/tmp/nowhere")
    check_runtime_flags()
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **more: pytest.fail("a process was started"))
    check_runtime_flags()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "=== Source Location Trace: ===\nERROR: Unknown command line flag 'nonsense'\n",
            "Unknown command line flag 'nonsense'",
        ),
        (
            "ERROR: Illegal value 'abc' specified for flag 'xla_tpu_x'\n",
            "Illegal value 'abc' specified for flag 'xla_tpu_x'",
        ),
        ("ModuleNotFoundError: No module named 'jaxlib'\n", None),
    ],
    ids=["unknown", "illegal", "another failure"],
)
def test_what_libtpu_says(said: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libtpu 0.0.51 says it."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--nonsense={reason}")
    done = types.SimpleNamespace(returncode=1, stderr=said)
    monkeypatch.setattr(runtime_flags.subprocess, "run", lambda *arguments, **more: done)
    if reason is None:
        check_runtime_flags()
        return
    with pytest.raises(InvalidValueError, match="^LIBTPU_INIT_ARGS in the environment would end the process") as caught:
        check_runtime_flags()
    assert f"({reason})" in str(caught.value)


@pytest.mark.tpu
def test_flags_that_libtpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_collective_fusion=true")
    check_runtime_flags()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_nonsense=1")
    with pytest.raises(InvalidValueError, match="Unknown command line flag 'xla_tpu_nonsense'"):
        check_runtime_flags()
