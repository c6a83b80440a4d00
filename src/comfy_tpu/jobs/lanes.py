"""Groups of jobs beside each other, where one at a time leaves processor cores idle."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from comfy_tpu.jobs.writing import Writer

COUNT = 2
"""Groups at a time. One waits for Python, its writer or its last core while the other computes."""

Action = Callable[[Writer], None]


class Lanes:
    """Carries out actions, each with a writer that is its own until it ends."""

    def __init__(self, make_writer: Callable[[], Writer]) -> None:
        # The last one first: where actions follow each other, all have the same one, and wait for it if it is behind.
        self._writers: queue.LifoQueue[Writer] = queue.LifoQueue()
        for _ in range(COUNT):
            self._writers.put(make_writer())
        self._threads = ThreadPoolExecutor(COUNT, "lane")
        self._running: set[Future[None]] = set()

    def run_alone(self, action: Action) -> None:
        """Waits for all others, and carries the action out in this thread."""
        self.wait()
        self._carry_out(action)

    def run_beside(self, action: Action) -> None:
        """Waits for a free lane, and returns when the action has begun there. Raises the error of an earlier one."""
        self._wait_until(COUNT - 1)
        self._running.add(self._threads.submit(self._carry_out, action))

    def wait(self) -> None:
        """Waits until no lane is used. Raises the error of an action that was begun by `run_beside`."""
        self._wait_until(0)

    def close(self) -> None:
        """Waits for all actions and until all files are written."""
        self._threads.shutdown()
        for _ in range(COUNT):
            self._writers.get().close()

    def _carry_out(self, action: Action) -> None:
        writer = self._writers.get()
        try:
            action(writer)
        finally:
            self._writers.put(writer)

    def _wait_until(self, running: int) -> None:
        while len(self._running) > running:
            ended, self._running = concurrent.futures.wait(
                self._running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for each in ended:
                each.result()
