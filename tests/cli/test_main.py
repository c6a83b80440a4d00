import argparse
import errno
import os
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

import comfy_tpu
from comfy_tpu.cli import main as cli
from comfy_tpu.errors import MeshError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch):
    """Installs a command called `try` whose run is the given function."""

    def install(run):
        module = types.ModuleType("comfy_tpu_command_under_test")
        module.add_arguments = lambda parser: parser.add_argument("--number", type=int, default=0)
        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cli, "COMMANDS", (cli.Command("try", "a command", module.__name__),))

    return install


def raising(error):
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


def test_exit_status_is_the_commands(command):
    command(lambda arguments: arguments.number)
    assert cli.main(["try", "--number", "7"]) == 7


def test_known_errors_are_one_line_without_a_traceback(command, capsys):
    command(raising(MeshError("heads=40 is not divisible by tp=3")))
    assert cli.main(["try"]) == 1
    assert capsys.readouterr() == ("", "comfy-tpu: heads=40 is not divisible by tp=3\n")


def test_unknown_errors_are_not_hidden(command):
    command(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_interrupt(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == "comfy-tpu: interrupted\n"


def test_missing_package_is_named_with_the_command(command, capsys):
    command(raising(ModuleNotFoundError("No module named 'jax'", name="jax")))
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err == 'comfy-tpu: jax is not installed; pip install "jax"\n'


def test_missing_module_of_ours_is_a_bug_and_shows(command):
    command(raising(ModuleNotFoundError("No module named 'comfy_tpu.gone'", name="comfy_tpu.gone")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["try"])


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "the process got no more memory (MemoryError); raise its limit (ulimit -v), or close"),
        (RuntimeError("can't start new thread"), "the process got no more memory (can't start new thread); raise"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "the process got no more memory (DefaultCPU"),
        (ImportError("x.so: failed to map segment from shared object"), "the process got no more memory (x.so: fai"),
        (
            OSError(errno.EIO, "Input/output error"),
            "a file cannot be read or written (Input/output error); look at the",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "x.json"),
            "x.json cannot be read or written (Too many open files",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the process got no more memory ([Errno 12] Cannot allocate"),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300),
            f"{'x' * 200}… (300 characters) cannot be opened (File name too long); give another path",
        ),
    ],
)
def test_errors_of_the_machine_are_sentences(error, text, command, capsys):
    command(raising(error))
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err.startswith(f"comfy-tpu: {text}")


@pytest.mark.parametrize(
    "error", [OSError(errno.EINVAL, "Invalid argument"), RuntimeError("no thread"), ImportError("x")]
)
def test_other_errors_of_these_kinds_are_not_hidden(error, command):
    command(raising(error))
    with pytest.raises(type(error)):
        cli.main(["try"])


def test_too_few_addresses_are_refused_before_libraries_are_loaded(command, capsys, monkeypatch):
    ran = []
    command(lambda arguments: ran.append(1) or 0)
    monkeypatch.setattr(cli.resource, "getrlimit", lambda kind: (2 * 2**30, resource.RLIM_INFINITY))
    assert cli.main(["try"]) == 1
    assert ran == []
    assert capsys.readouterr().err == (
        "comfy-tpu: this process may have 2.0 GiB of addresses (ulimit -v), and a model needs 3 GiB at least; "
        "raise the limit, or run it with `ulimit -v unlimited`\n"
    )
    monkeypatch.setattr(cli.resource, "getrlimit", lambda kind: (3 * 2**30, resource.RLIM_INFINITY))
    assert cli.main(["try"]) == 0


def test_a_real_limit_on_addresses():
    limited = f"ulimit -v {2 * 2**20}; exec {sys.executable} -m comfy_tpu.cli generate x"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(["bash", "-c", limited], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("comfy-tpu: this process may have 2.0 GiB of addresses (ulimit -v)")


@pytest.mark.parametrize("argv", [["frobnicate"], []], ids=["unknown", "none"])
def test_wrong_command(argv, capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    assert leaving.value.code == 2
    assert "usage: comfy-tpu" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert command.name in text
        assert command.summary in text


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"comfy-tpu {comfy_tpu.__version__}\n"


def test_reader_that_leaves_early_causes_no_traceback():
    code = (
        "import sys; from comfy_tpu.cli import main as cli; import types\n"
        "module = types.ModuleType('talker'); sys.modules['talker'] = module\n"
        "module.add_arguments = lambda parser: None\n"
        "module.run = lambda arguments: print('x' * 1_000_000) or 0\n"
        "cli.COMMANDS = (cli.Command('talk', '', 'talker'),)\n"
        "sys.exit(cli.main(['talk']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1
