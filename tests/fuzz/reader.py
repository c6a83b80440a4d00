"""A reader of the package as the fuzzing sees it, and the table of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

_SHOWN = 2000

READERS: dict[str, Reader] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """A file: its name, where that decides how it is read, and its content."""

    content: bytes
    name: str = "file"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        more = f"[:{_SHOWN}] of {len(self.content)}" if len(self.content) > _SHOWN else ""
        return f"Case({self.content[:_SHOWN]!r}{more}, {self.name!r})"


@dataclasses.dataclass(frozen=True)
class Reader:
    name: str
    modules: tuple[str, ...]
    """Modules of comfy_tpu whose reading this covers."""
    cases: Callable[[], st.SearchStrategy[Case]]
    prepare: Callable[[Path], Any]
    """Makes what the cases share, once, in a directory of its own."""
    read: Callable[[Path, Any, Case], Any]
    """Reads one case. It may raise our errors, and leaves the directory as it was for the next case."""
    share: float = 1.0
    """The part of the usual number of cases in the bounded run, for one that takes longer."""


def reader(
    *modules: str,
    cases: Callable[[], st.SearchStrategy[Case]],
    prepare: Callable[[Path], Any] = lambda directory: None,
    share: float = 1.0,
) -> Callable[[Callable[[Path, Any, Case], Any]], Callable[[Path, Any, Case], Any]]:
    """Adds a function to the table, by its name."""

    def add(read: Callable[[Path, Any, Case], Any]) -> Callable[[Path, Any, Case], Any]:
        name = read.__name__.removeprefix("read_")
        if name in READERS:
            raise ValueError(f"{name} is in the table already, of {READERS[name].modules}")
        READERS[name] = Reader(name, modules, cases, prepare, read, share)
        return read

    return add


def named(name: str, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[Case]:
    return contents.map(lambda content: Case(content, name))
