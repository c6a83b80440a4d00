"""Compiled programs, and facts that tracing found, kept on disk so that a new process neither traces nor compiles."""

from comfy_tpu.compiler.stored.entries import Entries, EntryInfo
from comfy_tpu.compiler.stored.identity import NotDescribableError, describe
from comfy_tpu.compiler.stored.store import ProgramOrigin, ProgramStore, keep_limit, open_store

__all__ = [
    "Entries",
    "EntryInfo",
    "NotDescribableError",
    "ProgramOrigin",
    "ProgramStore",
    "describe",
    "keep_limit",
    "open_store",
]
