"""Signals while modules are imported: extensions lose an exception there, or die of it, so the process ends itself."""

import os
import signal

import pytest

from comfy_tpu.cli import main as cli
from comfy_tpu.cli import models
from comfy_tpu.pipeline.partial_files import open_partial

MODULE = """
import signal
try:
    signal.raise_signal({number})
except BaseException as error:  # as an extension that goes on
    raised = type(error).__name__
"""


@pytest.mark.parametrize(("number", "err"), [(signal.SIGINT, "comfy-tpu: interrupted\n"), (signal.SIGTERM, "")])
def test_a_signal_while_a_module_is_imported_ends_the_process(number, err, monkeypatch, tmp_path, capsys):
    module = f"interrupted_by_{int(number)}"
    (tmp_path / f"{module}.py").write_text(MODULE.format(number=int(number)))
    ended = []

    def run(arguments):
        with open_partial(tmp_path) as partial:
            __import__(module)
            assert not partial.exists()
        return 0

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "run", run)
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.getsignal(number)
    cli.main(["models"])
    assert ended == [128 + number]
    assert capsys.readouterr().err == err
    assert signal.getsignal(number) is before


def test_a_command_that_a_module_runs_on_import_is_interrupted_as_any_other(monkeypatch, tmp_path, capsys):
    (tmp_path / "runs_a_command.py").write_text("from comfy_tpu.cli.main import main\nstatus = main(['models'])\n")

    def run(arguments):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "run", run)
    assert __import__("runs_a_command").status == cli.INTERRUPTED
    assert capsys.readouterr().err == "comfy-tpu: interrupted\n"
