"""What happens under ComfyUI's nodes: programs that are compiled, calls that reach the devices, warnings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from comfy_tpu.compiler.hosted import HostedModule
from comfy_tpu.compiler.program import Program


class Watch(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.compiled: list[str] = []
        """Names of programs, one for each that was built."""
        self.calls: list[str] = []
        """Names of modules, one for each call that the devices answered."""
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def clear(self) -> None:
        self.compiled.clear()
        self.calls.clear()
        self.warnings.clear()

    def assert_on_devices(self) -> None:
        """That the devices did it, and not ComfyUI's own code on the host."""
        assert not self.warnings
        assert self.calls


@contextlib.contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    build, call = Program._build, HostedModule.__call__

    def building(self, *args, **kwargs):
        built = build(self, *args, **kwargs)
        watch.compiled.append(self.name)
        return built

    def calling(self, *args, **kwargs):
        results = call(self, *args, **kwargs)
        watch.calls.append(self.name)
        return results

    monkeypatch.setattr(Program, "_build", building)
    monkeypatch.setattr(HostedModule, "__call__", calling)
    logger = logging.getLogger("comfy_tpu")
    logger.addHandler(watch)
    try:
        yield watch
    finally:
        logger.removeHandler(watch)
