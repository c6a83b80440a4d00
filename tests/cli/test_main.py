import argparse
import os
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
