"""What a batch shows: a line of progress for people, JSON lines for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from types import TracebackType
from typing import Any

from comfy_tpu.cli.terminal import print_error, print_message
from comfy_tpu.jobs.driver import Refusal
from comfy_tpu.jobs.ledger import Counts
from comfy_tpu.jobs.outcome import Event, Outcome
from comfy_tpu.terminal_text import escape_controls, excerpt

_MESSAGES_MAX = 20
"""Refused lines and failed jobs that are printed; the rest is in results.jsonl, and counted."""


class Display:
    """A bar with the jobs done, the rate and the time left, if stderr is a terminal; errors as lines."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._printed = 0
        self._failed = 0

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def refused(self, refusal: Refusal) -> None:
        self._print(f"line {refusal.line} is left out: {refusal.reason}")

    def submitted(self, counts: Counts) -> None:
        if counts.done:
            print_message(f"{counts.done} of {counts.total} jobs are done already")
        if sys.stderr.isatty() and counts.open:
            from tqdm import tqdm

            self._bar = tqdm(
                total=counts.total, initial=counts.done, unit="job", smoothing=0.1, dynamic_ncols=True, file=sys.stderr
            )

    def event(self, event: Event) -> None:
        if self._bar is not None:
            what = f" {event.done}/{event.total}" if event.total > 1 else ""
            self._bar.set_postfix_str(escape_controls(f"{event.stage}{what}{self._failures}"), refresh=False)
            self._bar.refresh()

    def finished(self, outcome: Outcome, state: str, counts: Counts) -> None:
        if state == "failed":
            self._failed += 1
            others = "; so do all jobs of its model and mesh" if outcome.is_of_model else ""
            self._print(f"{outcome.job_name} failed: {outcome.error}{others}")
        elif outcome.error:
            self._print(f"{outcome.job_name} is tried again: {outcome.error}")
        if state == "done" and outcome.cut:
            self._print(f"{outcome.job_name}: its prompt is longer than the model reads: {excerpt(outcome.cut)}")
        if state == "done" and outcome.resumed_after:
            print_message(f"{outcome.job_name} resumed after step {outcome.resumed_after}")
        if self._bar is not None:
            self._bar.n = counts.done
            self._bar.refresh()

    def message(self, text: str) -> None:
        print_message(text)

    def summary(self, counts: Counts, refused: int, seconds: float) -> None:
        left = f", {refused} lines left out" if refused else ""
        failed = f", {counts.failed} failed" if counts.failed else ""
        still = f", {counts.open} left to other drivers" if counts.open else ""
        print_message(f"{counts.done} of {counts.total} jobs done{failed}{still}{left} in {seconds:.0f} s")

    @property
    def _failures(self) -> str:
        return f", {self._failed} failed" if self._failed else ""

    def _print(self, text: str) -> None:
        self._printed += 1
        if self._printed <= _MESSAGES_MAX:
            print_error(text)
        elif self._printed == _MESSAGES_MAX + 1:
            print_error("more of this kind is in results.jsonl")


class JsonDisplay:
    def __init__(self) -> None:
        self._shown_at = 0.0

    def __enter__(self) -> JsonDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def refused(self, refusal: Refusal) -> None:
        self._print("refused", **dataclasses.asdict(refusal))

    def submitted(self, counts: Counts) -> None:
        self._print("submitted", total=counts.total, done=counts.done)

    def event(self, event: Event) -> None:
        if time.monotonic() - self._shown_at >= 1.0:
            self._shown_at = time.monotonic()
            self._print("progress", **dataclasses.asdict(event))

    def finished(self, outcome: Outcome, state: str, counts: Counts) -> None:
        if state == "done":
            files = [dataclasses.asdict(each) for each in outcome.outputs]
            facts = {"seconds": dict(outcome.seconds), "cut": outcome.cut, "resumed_after": outcome.resumed_after}
            self._print("done", id=outcome.id, line=outcome.line, outputs=files, **facts)
        elif outcome.error:
            named = {"id": outcome.id, "line": outcome.line, "output": outcome.output}
            self._print("failed", **named, error=outcome.error, final=state == "failed", of_model=outcome.is_of_model)

    def message(self, text: str) -> None:
        self._print("message", text=text)

    def summary(self, counts: Counts, refused: int, seconds: float) -> None:
        left = {"done": counts.done, "failed": counts.failed, "open": counts.open, "refused": refused}
        self._print("summary", **left, seconds=seconds)

    def _print(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), flush=True)
