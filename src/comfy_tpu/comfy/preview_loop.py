"""Previews of a video that move: the frames of the latest one are sent in turn. Needs no ComfyUI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Frame = TypeVar("Frame")

_MAX_PLAYS = 3
"""Times that a preview is played. ComfyUI's frontend (1.35) does not free an image that another replaces while a node
runs: steps that take minutes must not fill the browser's memory."""


class PreviewLoop(Generic[Frame]):
    """Plays the frames of a step until the next one. `send` is called from a thread, `rate` times a second."""

    def __init__(self, send: Callable[[Frame], None], rate: float) -> None:
        self._send, self._seconds = send, 1 / rate
        self._lock = threading.Lock()
        self._frames: Sequence[Frame] = ()
        self._position = self._left = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def replace(self, frames: Sequence[Frame]) -> Frame:
        """Plays other frames from the current position on. Returns the first of them, for the caller to show."""
        with self._lock:
            self._frames, self._left = frames, _MAX_PLAYS * len(frames)
            self._position %= len(frames)
            current = frames[self._position]
        if len(frames) > 1 and self._thread is None:
            self._thread = threading.Thread(target=self._play, name="comfy-tpu previews", daemon=True)
            self._thread.start()
        return current

    def close(self) -> None:
        """Sends nothing any more once this returns."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _play(self) -> None:
        while not self._closed.wait(self._seconds):
            with self._lock:
                if not self._left:
                    continue
                self._position = (self._position + 1) % len(self._frames)
                self._left -= 1
                self._send(self._frames[self._position])
