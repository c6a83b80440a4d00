"""Runs a stage once for every point at which it may fail or be killed, and says what was wrong afterwards.

After a failure: one sentence and status 1, or the result of an undisturbed run; no partial file, and nothing at the
place of a result but a whole one. Run again, the stage gives what it gives undisturbed. So it does after a kill. What a
kill leaves is what lies on the disk at that moment, so that one observed run shows all kills: the directory is copied
before every call that changes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.faults.injection import FAULTS, PYTHON_KINDS, PythonPoints, SystemPoints

Tree = dict[str, Any]
"""What lies in a directory: contents by path."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Something that writes files."""

    name: str
    run: Callable[[], tuple[int, str]]
    """Status and what was printed to standard error."""
    prepare: Callable[[], None] = lambda: None
    """Called before each run, undisturbed."""
    ignored: tuple[str, ...] = ()
    """Beginnings of paths whose content may differ: caches."""
    kept: tuple[str, ...] = ()
    """Files that a run may leave where it fails, if they are whole: saved steps."""


@dataclasses.dataclass
class Report:
    points: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: int = 0
    """Runs that ended by a fault."""
    tolerated: int = 0
    """Runs that gave the whole result in spite of one."""
    kills: int = 0
    """Different states that a kill may leave."""
    findings: list[str] = dataclasses.field(default_factory=list)


class Examination:
    def __init__(self, work: Path, points: SystemPoints | None, every: Callable[[int], Iterable[int]]) -> None:
        """`work`: the directory of the results; what is in it now is what each run begins with. `every`: of the number
        of points of a kind, the numbers of those that are tried."""
        self._work, self._points, self._every = work, points, every
        self._first = work.with_name(work.name + "-first")
        shutil.copytree(work, self._first, symlinks=True)
        self._python = PythonPoints()

    def examine(self, stage: Stage, *, kinds: Iterable[str]) -> Report:
        report, kinds = Report(), tuple(kinds)
        expected = self._undisturbed(stage, report, kinds)
        good = {_digest(expected)}
        for kind, error, sticky in FAULTS:
            if self._points is not None and kind in kinds:
                for number in self._every(report.points[kind]):
                    what = f"{stage.name}: {kind} {number}, errno {error}{' and later' if sticky else ''}"
                    with self._begin(stage), self._points.failing(kind, number, error, sticky):
                        ended = _run(stage)
                    # Where a directory cannot be opened, its files cannot be removed: the next run does it.
                    self._check(stage, what, ended, expected, good, report, leaves_partial=kind == "open")
        for kind in PYTHON_KINDS:
            if kind in kinds:
                for number in self._every(report.points[kind]):
                    with self._begin(stage), self._python.installed(), self._python.failing(kind, number):
                        ended = _run(stage)
                    self._check(stage, f"{stage.name}: {kind} {number}", ended, expected, good, report)
        if self._points is not None and "kill" in kinds:
            self._kill(stage, expected, good, report)
        self._undisturbed_again(stage, expected, report)
        return report

    def _undisturbed(self, stage: Stage, report: Report, kinds: tuple[str, ...]) -> Tree:
        if self._points is not None:
            with self._begin(stage), self._points.counting() as counts:
                ended = _run(stage)
            report.points |= {kind: count for kind, count in counts.items() if kind in kinds}
        if set(kinds) & set(PYTHON_KINDS):
            with self._begin(stage), self._python.installed(), self._python.counting() as counts:
                ended = _run(stage)
            report.points |= {kind: count for kind, count in counts.items() if kind in kinds}
        assert ended[0] == 0, ended
        return read_tree(self._work, stage.ignored)

    def _undisturbed_again(self, stage: Stage, expected: Tree, report: Report) -> None:
        """A fault must not leave anything in the process, either."""
        with self._begin(stage):
            ended = _run(stage)
        if ended != (0, ended[1]) or read_tree(self._work, stage.ignored) != expected:
            report.findings.append(f"{stage.name}: undisturbed after all faults, {ended}")

    def _begin(self, stage: Stage) -> Any:
        self._restore(self._first)
        stage.prepare()
        return contextlib.nullcontext()

    def _restore(self, source: Path) -> None:
        for entry in self._work.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        shutil.copytree(source, self._work, symlinks=True, dirs_exist_ok=True)

    def _check(
        self,
        stage: Stage,
        what: str,
        ended: tuple[int, str],
        expected: Tree,
        good: set[str],
        report: Report,
        *,
        leaves_partial: bool = False,
    ) -> None:
        status, err = ended
        left = read_tree(self._work, stage.ignored)
        errors = [line for line in err.splitlines() if line.startswith("comfy-tpu: ") and "warning" not in line]
        partial = [name for name in left if ".partial" in name]
        whole = {name: content for name, content in left.items() if not leaves_partial or name not in partial}
        if status == 0:
            report.tolerated += 1
            if whole != expected:
                report.findings.append(f"{what}: status 0, but {_difference(left, expected)}")
            self._run_again(stage, what, left, expected, good, report)
            return
        report.failed += 1
        if status != 1 or "Traceback" in err or not errors:
            report.findings.append(f"{what}: status {status}: {err.strip()[-600:]}")
        first = read_tree(self._first, stage.ignored)
        wrong = [
            name
            for name, content in whole.items()
            if content not in (expected.get(name, 0), first.get(name, 0))
            and (name not in stage.kept or str(content).startswith("damaged"))
        ]
        if wrong:
            report.findings.append(f"{what}: left {wrong}")
        self._run_again(stage, what, left, expected, good, report)

    def _run_again(self, stage: Stage, what: str, left: Tree, expected: Tree, good: set[str], report: Report) -> None:
        """Once for each state of the disk."""
        if _digest(left) in good:
            return
        good.add(_digest(left))
        ended = _run(stage)
        if ended[0] != 0 or read_tree(self._work, stage.ignored) != expected:
            found = _difference(read_tree(self._work, stage.ignored), expected)
            report.findings.append(f"{what}: run again: {ended}, {found}")

    def _kill(self, stage: Stage, expected: Tree, good: set[str], report: Report) -> None:
        states: dict[str, Path] = {}
        place = self._work.with_name(self._work.name + "-killed")
        calls = 0

        def observe(kind: str) -> None:
            nonlocal calls
            calls += 1
            state = _digest(read_bytes(self._work))
            if state not in states:
                states[state] = place / str(len(states))
                shutil.copytree(self._work, states[state], symlinks=True)

        assert self._points is not None
        with self._begin(stage), self._points.observing(observe):
            assert _run(stage)[0] == 0
        chosen = [path for number, path in enumerate(states.values(), 1) if number in set(self._every(len(states)))]
        report.kills, report.points["kill"] = len(chosen), calls
        for path in chosen:
            self._restore(path)
            stage.prepare()
            ended = _run(stage)
            left = read_tree(self._work, stage.ignored)
            if ended[0] != 0 or left != expected:
                report.findings.append(f"{stage.name}: killed in {path.name}: {ended}, {_difference(left, expected)}")
        shutil.rmtree(place, ignore_errors=True)


def _run(stage: Stage) -> tuple[int, str]:
    try:
        return stage.run()
    except BaseException:  # noqa: BLE001 - what a command does not catch is what is looked for
        return 99, traceback.format_exc()


def read_bytes(directory: Path) -> Tree:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def read_tree(directory: Path, ignored: tuple[str, ...] = ()) -> Tree:
    """Safetensors by their metadata and tensors: the library writes metadata in any order."""
    from safetensors import SafetensorError, safe_open

    tree = {name: content for name, content in read_bytes(directory).items() if not name.startswith(ignored or "\0")}
    for name in [name for name in tree if name.endswith(".safetensors")]:
        try:
            with safe_open(directory / name, framework="pt") as file:
                tensors = {key: file.get_tensor(key).numpy().tobytes() for key in file.keys()}  # noqa: SIM118
                tree[name] = (sorted((file.metadata() or {}).items()), sorted(tensors.items()))
        except SafetensorError as error:
            tree[name] = f"damaged: {error}"
    return tree


def _digest(tree: Tree) -> str:
    return hashlib.sha256(repr(sorted(tree.items())).encode()).hexdigest()


def _difference(found: Tree, expected: Tree) -> str:
    names = {*found, *expected}
    different = [name for name in sorted(names) if found.get(name, 0) != expected.get(name, 0)]
    return f"these differ: {different}; there are {sorted(found)}"
