"""Termination signals that wait until the running step is saved.

A signal is not changed, only late: once the state is saved, the handler that was there before gets it. A second signal
ends the process at once, also inside a step, where Python's main thread waits for the devices and handles nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from signal import SIGHUP, SIGINT, SIGTERM
from types import FrameType

from comfy_tpu.pipeline.partial_files import remove_own

_DEFERRED = (SIGTERM, SIGHUP)


class DeferredSignals:
    """The signals of one `deferring` block."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The number of the signal that came, and was not delivered yet."""
        self._installed = contextlib.ExitStack()

    def deliver(self) -> None:
        """Ends the deferring, and hands the received signal, if there is one, to its earlier handler, which may raise
        or end the process."""
        number, self.received = self.received, None
        self._installed.close()  # before: a signal that is raised now must not count as a second one
        if number is not None:
            signal.raise_signal(number)

    def install(self) -> None:
        self._installed.enter_context(_ending_at_second_signal())
        for number in _DEFERRED:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):  # nohup ignores SIGHUP; None: not set from Python
                signal.signal(number, self._receive)
                self._installed.callback(signal.signal, number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:  # the second one
            self.deliver()
        self.received = number


@contextlib.contextmanager
def deferring(*, is_active: bool = True) -> Iterator[DeferredSignals]:
    """Defers termination signals in the block, until it delivers them. Only in the main thread, where Python lets
    handlers be set; elsewhere, and where not `is_active`, nothing is deferred."""
    signals = DeferredSignals()
    if is_active and threading.current_thread() is threading.main_thread():
        signals.install()
    try:
        yield signals
    finally:
        signals.deliver()


@contextlib.contextmanager
def _ending_at_second_signal() -> Iterator[None]:
    """Has another thread end the process at a second signal. Does nothing where something else, such as an event loop,
    listens to signals by the same means."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before == -1:
        threading.Thread(target=_watch, args=(reader,), name="second signal", daemon=True).start()
    else:
        signal.set_wakeup_fd(before)
        reader.close()
    try:
        yield
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
        writer.close()


def _watch(reader: socket.socket) -> None:
    with reader:
        is_asked = False
        while received := reader.recv(1):
            if is_asked and received[0] in (*_DEFERRED, SIGINT):
                remove_own()
                os._exit(128 + received[0])
            is_asked = is_asked or received[0] in _DEFERRED
