"""A family whose test did not pass stays: the messages say how to test it again, and how to remove it."""

import argparse
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

import pytest

from comfy_tpu.cli import port_new
from comfy_tpu.cli.main import main
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.porting.scaffold import new, report
from comfy_tpu.porting.scaffold.destination import Checkout, Pack
from comfy_tpu.porting.scaffold.files import undo_command, write
from comfy_tpu.porting.scaffold.renderer import MARK

ROOT = Path(__file__).parents[2]
FILES = {"src/mine.py": "x = 1\n", "docs/Mine/en.md": "mine\n", "docs/Mine/zh.md": "mine\n", "registry.py": "after\n"}


def git(checkout: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x")
    return subprocess.run(["git", *who, *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "a checkout"
    (root / "src").mkdir(parents=True)
    (root / "docs").mkdir()
    (root / "registry.py").write_text("before\n")
    (root / "docs" / "old.md").write_text("old\n")
    (root / "src" / "old.py").write_text("")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def test_the_command_removes_all_of_it(checkout: Path) -> None:
    line = undo_command(checkout, FILES, "mine")
    write(checkout, FILES)
    assert len(git(checkout, "status", "--short").splitlines()) == 3
    subprocess.run(line, shell=True, check=True)
    assert git(checkout, "status", "--short") == ""
    assert not (checkout / "docs/Mine").exists()


def test_changes_that_git_does_not_have_are_not_thrown_away(checkout: Path) -> None:
    (checkout / "registry.py").write_text("mine, not committed\n")
    line = undo_command(checkout, FILES, "mine")
    assert line.endswith("  # and remove the lines of mine from registry.py, of which git has no copy")
    write(checkout, FILES)
    subprocess.run(line, shell=True, check=True)
    assert (checkout / "registry.py").read_text() == "after\n"
    assert not (checkout / "src/mine.py").exists()


def test_without_git(tmp_path: Path) -> None:
    (tmp_path / "registry.py").write_text("before\n")
    assert "git restore" not in undo_command(tmp_path, FILES, "mine")
    assert "from registry.py" in undo_command(tmp_path, FILES, "mine")


def scaffold(checkout: Path) -> Any:
    calls = types.SimpleNamespace(unexplained=[])
    facts = types.SimpleNamespace(name="mine", calls=calls)
    return types.SimpleNamespace(destination=Checkout(checkout, "mine"), files=FILES, facts=facts, blocked=False)


@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupted_test(
    raised: BaseException,
    status: int,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise raised

    monkeypatch.setattr(new, "make_scaffold", lambda *_, **__: scaffold(checkout))
    monkeypatch.setattr(report, "format_lines", lambda _: [])
    monkeypatch.setattr(port_new, "_test", interrupted)
    try:
        ended: object = main(["port", "new", "mine", "--from", "X"])
    except SystemExit as error:
        ended = error.code
    assert ended == status
    said = capsys.readouterr().err
    assert "The 4 files of mine are written, and stay. Test again: cd " in said
    assert f"{sys.executable} -m pytest tests/families/test_ported_parity.py -k mine" in said
    found = re.search(r"^Remove all of it: (.*)$", said, flags=re.MULTILINE)
    assert found is not None
    subprocess.run(found[1], shell=True, check=True)
    assert git(checkout, "status", "--short") == ""


def ending(checkout: Path, *, dry_run: bool, directory: Path | None) -> str:
    made = scaffold(checkout)
    made.facts.model_id, made.facts.title = "owner/model", "Mine"
    made.facts.source = types.SimpleNamespace(directory=directory)
    outcome = {"tested": None, "seconds_to_a_frame": None, "undo": "undo"}
    return "\n".join(port_new._ending(made, outcome, argparse.Namespace(dry_run=dry_run, no_test=True)))


def test_the_next_steps_can_be_run(checkout: Path) -> None:
    """A class does not tell the published configuration, so `plan` does not know the id."""
    of_class = ending(checkout, dry_run=False, directory=None)
    assert "comfy-tpu plan DIR --tpu" in of_class
    assert 'comfy-tpu generate "a purple star" --model owner/model' in of_class
    assert "comfy-tpu plan owner/model --tpu" in ending(checkout, dry_run=False, directory=checkout)


def test_nothing_comes_next_where_nothing_was_written(checkout: Path) -> None:
    dry = ending(checkout, dry_run=True, directory=None)
    assert "4 files would be written" in dry
    assert "comfy-tpu" not in dry


def test_a_signal_ends_the_test_too(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first line arrives, and with it the signal. The test would go on for a minute."""
    (checkout / "slow.py").write_text("import time\n\ndef test_slow():\n    time.sleep(60)\n")
    begun: list[Any] = []
    popen = subprocess.Popen

    def noted(*args: Any, **kwargs: Any) -> Any:
        begun.append(popen(*args, **kwargs))
        return begun[0]

    def interrupted(_: list[str]) -> NoReturn:
        raise SystemExit(143)

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(port_new, "_print", interrupted)
    slow = scaffold(checkout)
    slow.destination.test = ("slow.py",)
    with pytest.raises(SystemExit):
        port_new._test(slow, 0.0, quiet=False)
    assert begun[0].returncode == -15


def test_a_name_that_an_earlier_run_took(tmp_path: Path) -> None:
    family = tmp_path / "src/comfy_tpu/families/mine"
    family.mkdir(parents=True)
    (family / "__init__.py").write_text(f'"""Mine. {MARK} from X."""')
    with pytest.raises(InvalidValueError, match="name=mine is taken: .*/mine exists; an earlier `port new mine` wrote"):
        Checkout(tmp_path, "mine").check(writes=True)
    with pytest.raises(InvalidValueError, match="name=wan is taken: .*/wan exists, and nothing is overwritten"):
        Checkout(ROOT, "wan").check(writes=True)


def test_a_pack_is_removed_whole(tmp_path: Path) -> None:
    pack = tmp_path / "a pack"
    line = undo_command(pack, FILES, "mine")
    write(pack, FILES)
    subprocess.run(line, shell=True, check=True, cwd=tmp_path)
    assert not pack.exists()
    assert Pack(pack, "mine").package == "comfy_tpu_mine"
