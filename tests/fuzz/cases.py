"""What holds for every case: our own error in one sentence or a result, soon, and nothing written elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from comfy_tpu.errors import ComfyTpuError

LONG = int(os.environ.get("COMFY_TPU_FUZZ_CASES", "10000"))
"""Cases of each reader in the long run."""
SECONDS = 10.0
"""Of processor time, so that a busy machine is no hang; one that waits is pytest-timeout's."""
SENTENCE_MAX = 6000
"""Characters. A message may quote a path and a name of 300 each, or list all settings."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TORCH_PLACE = str(Path(tempfile.gettempdir()) / "torchinductor_")
"""Made by torch when it is imported for diffusers."""
_CHANGES = frozenset(
    (
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.chmod",
        "shutil.move",
    )
)


class HangError(BaseException):
    """Not an Exception: no reader may take it for one of a library."""


def run_settings(cases: int) -> settings:
    """The same cases in every run: what fails here fails everywhere. More are found with another COMFY_TPU_FUZZ_CASES,
    and by another version of Hypothesis."""
    return settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def check_sentence(text: str) -> None:
    assert text.strip(), "an error without a message"
    assert "\n" not in text, f"more than a line: {text[:500]!r}"
    assert "Traceback" not in text, text[:500]
    assert not _CONTROLS.search(text), f"control characters: {text[:500]!r}"
    assert len(text) <= SENTENCE_MAX, f"{len(text)} characters: {text[:500]!r}"


def attempt(read: Callable[[], Any], allowed: Path) -> Any:
    """What `read` returns; None where it raises an error of ours. Fails for any other, a hang, or a write outside of
    `allowed`."""
    with _limit_time(), watch_writes(allowed):
        try:
            return read()
        except ComfyTpuError as error:
            check_sentence(str(error))
            return None


@contextlib.contextmanager
def _limit_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError(f"more than {SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Watch:
    """Python's audit events of files; a hook stays for ever, so there is one, which is switched on and off."""

    allowed: str | None = None
    found: list[str]

    def __init__(self) -> None:
        self.found = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, mode, flags = arguments
            is_write = bool(flags & _WRITING) if isinstance(flags, int) else bool(set(mode or "") & set("wax+"))
            paths = [path] if is_write else []
        elif event in _CHANGES:
            paths = [each for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike)]
        else:
            return
        self.found += [f"{event} {each!r}" for each in paths if not self._is_allowed(each)]

    def _is_allowed(self, path: Any) -> bool:
        if isinstance(path, int):
            return True
        full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link is judged where it is
        places = (f"{self.allowed}{os.sep}", _TORCH_PLACE)
        return full in (os.devnull, self.allowed) or full.startswith(places)


_watch: _Watch | None = None


@contextlib.contextmanager
def watch_writes(allowed: Path) -> Iterator[None]:
    """Fails where Python code writes, renames or removes a file elsewhere."""
    global _watch
    _watch = _watch or _Watch()
    _watch.found, _watch.allowed = [], str(allowed)
    try:
        yield
    finally:
        _watch.allowed = None
    assert not _watch.found, f"written outside of {allowed}: {_watch.found}"
