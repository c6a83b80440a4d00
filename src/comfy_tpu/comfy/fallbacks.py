"""Which nodes computed on the host instead of the devices, and why: for the panel, the badges on nodes and TPU Info."""

from __future__ import annotations

import dataclasses
import re
import threading
from typing import Any

from comfy_tpu.errors import section_of
from comfy_tpu.terminal_text import escape_controls

_MAX_ENTRIES = 32
_MAX_CHARACTERS = 300
_DIRECTORY = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\s\\/:;,]+)+[\\/](?=[^\s\\/])")


@dataclasses.dataclass(frozen=True)
class NodeRun:
    """One execution of a node, by ComfyUI's ids; None outside of a prompt."""

    node: str | None = None
    prompt: str | None = None


@dataclasses.dataclass(frozen=True)
class HostRun:
    """A module that a node ran on the host."""

    run: NodeRun
    compile_node: str | None
    """The TPU Compile node that the module comes from."""
    what: str
    """The class of the module."""
    reason: str
    number: int
    """Increases with every entry: a page shows no entry again that is older than the run it has seen start."""


class Fallbacks:
    """The latest host runs, one for each node and module. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str | None, str], HostRun] = {}
        self._count = 0

    def record(self, run: NodeRun, what: str, reason: str, compile_node: str | None = None) -> bool:
        """Records a call that ran on the host; whether that is news."""
        text = shorten_reason(reason)
        with self._lock:
            known = self._entries.get((run.node, what))
            if known is not None and (known.run, known.compile_node, known.reason) == (run, compile_node, text):
                return False
            self._count += 1
            self._entries.pop((run.node, what), None)
            self._entries[run.node, what] = HostRun(run, compile_node, what, text, self._count)
            for oldest in list(self._entries)[:-_MAX_ENTRIES]:
                del self._entries[oldest]
            return True

    def clear(self, run: NodeRun, what: str) -> bool:
        """Records a call that ran on the devices; whether that removed an entry.

        An entry of the same execution stays: a sampler with Skip Layer Guidance may run one call of a step on the
        devices and the next on the host.
        """
        with self._lock:
            known = self._entries.get((run.node, what))
            if known is None or (known.run == run and run.prompt is not None):
                return False
            del self._entries[run.node, what]
            return True

    def as_list(self) -> list[dict[str, Any]]:
        """The entries as JSON, oldest first."""
        with self._lock:
            return [
                {
                    "node": entry.run.node,
                    "compile_node": entry.compile_node,
                    "what": entry.what,
                    "reason": entry.reason,
                    "number": entry.number,
                }
                for entry in self._entries.values()
            ]


def shorten_reason(reason: str) -> str:
    """A reason in one line, without directories of this machine and without the reference to the guide."""
    message, _ = section_of(Exception(reason))
    line = escape_controls(_DIRECTORY.sub("", " ".join(message.split())))
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 1]}…"
