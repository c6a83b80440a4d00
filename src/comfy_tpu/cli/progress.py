"""Progress of a pipeline in a terminal, and the time of each stage."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from comfy_tpu.cli.terminal import print_message
from comfy_tpu.families.presets import describe_settings
from comfy_tpu.parallel.hosts import is_first_host
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.terminal_text import escape_controls

Key = tuple[str, str]

_SPANS = 3
"""The number of spans of reused steps that a bar shows: a terminal of 80 columns has no room for all."""
_LINE = "{desc}"
_STEPS = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{rate_inv_fmt}, {remaining} left]"
_BYTES = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}B/{total_fmt}B [{rate_fmt}, {remaining} left]"


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    what: str
    from_cache: bool
    seconds: float


class StageTimes:
    """Seconds by stage. The time of a stage inside another (compiling inside denoising) counts for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.programs: list[CompiledProgram] = []
        self.reused: list[int] = []
        """The numbers of the steps at which the transformer did not run."""
        self._open: list[Key] = []
        self._started: dict[Key, float] = {}
        self._began = self._last = time.monotonic()

    @property
    def total(self) -> float:
        return time.monotonic() - self._began

    def add(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._open:
            stage, _ = self._open[-1]
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
        if progress.reused:
            self.reused.append(progress.done)
        key = (progress.stage, progress.label)
        if key not in self._open:
            self._open.append(key)
            self._started[key] = now
        if progress.done >= progress.total:
            self._open.remove(key)
            if progress.stage == "compiling":
                program = CompiledProgram(progress.label, progress.from_cache, now - self._started[key])
                self.programs.append(program)


class Display:
    """A progress callback that shows bars on stderr if it is a terminal."""

    def __init__(self) -> None:
        self.account = StageTimes()
        self._bars: dict[Key, Any] = {}

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()

    def __call__(self, progress: Progress) -> None:
        self.account.add(progress)
        if not sys.stderr.isatty() or not is_first_host():
            return
        key = (progress.stage, progress.label)
        if key not in self._bars:
            self._bars[key] = self._new_bar(progress)
        bar = self._bars[key]
        if progress.reused:
            reused = format_spans(self.account.reused)
            bar.set_description_str(escape_controls(f"{progress.stage} {progress.size}, reused {reused}"))
        bar.update(progress.done - bar.n)
        if progress.done >= progress.total:
            if progress.stage == "compiling":
                bar.leave = not progress.from_cache  # nothing was compiled then, and nothing stays to say so
                bar.set_description_str(f"{bar.desc}: {self.account.programs[-1].seconds:.1f} s")
            self._bars.pop(key).close()

    def show_own_settings(self, settings: Mapping[str, Any]) -> None:
        """Shows, where bars are shown, the settings that the model decided."""
        if settings and sys.stderr.isatty():
            print_message(f"the model's own: {describe_settings(settings)}")

    def _new_bar(self, progress: Progress) -> Any:
        from tqdm import tqdm

        text = f"{progress.stage} {progress.what or progress.size}"
        form, unit = _LINE, ""
        if progress.stage == "loading":
            form, unit = _BYTES, "B"
        elif progress.stage == "denoising":
            form, unit = _STEPS, "step"
        elif progress.stage in ("decoding", "interpolating"):
            form, unit = _STEPS, "frame"
        elif progress.stage == "compiling":
            size = f" at {progress.size}" if progress.size else ""
            text = f"compiling {progress.what} (first run{size})"
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
        # mininterval: a step takes seconds, and each is worth showing; miniters: or tqdm would learn to skip some.
        return tqdm(
            total=progress.total,
            initial=progress.done,  # steps that an earlier run has done are no measure of the speed
            desc=escape_controls(text).replace("\n", r"\n"),
            bar_format=form,
            unit=unit,
            unit_scale=unit == "B",
            unit_divisor=1024,
            file=sys.stderr,
            # Some terminals (docker exec, CI) do not know their size and say 0, at which tqdm shows nothing.
            ncols=columns or 80,
            nrows=lines or 24,
            miniters=1,
            mininterval=0.05,
        )


def format_spans(numbers: Sequence[int]) -> str:
    """The last few numbers, neighbours as a span: "… 16–17, 19"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    shown = ", ".join("–".join(map(str, span)) for span in spans[-_SPANS:])
    return f"… {shown}" if len(spans) > _SPANS else shown
