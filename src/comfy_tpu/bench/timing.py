"""Peers timed in turn, so that a clock that drifts drifts for all of them. A failure becomes a row with its reason."""

from __future__ import annotations

import dataclasses
import gc
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from comfy_tpu.bench.devices import free_torch_memory
from comfy_tpu.bench.results import Row


class ProgressCallback(Protocol):
    """Receives the rows and remarks of a part."""

    def row(self, row: Row) -> None: ...

    def note(self, text: str) -> None: ...


@dataclasses.dataclass
class Candidate:
    """A peer that is ready for its first call. The call returns when the device is done."""

    call: Callable[[], Any]
    read: Callable[[Any], torch.Tensor] | None = None
    """The output of the call -> a tensor that can be compared."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """May grow while the call runs."""


Prepare = Callable[[], Candidate]
MeasureError = Callable[[torch.Tensor], float]


def time_interleaved(
    row: Row,
    peers: Mapping[str, Prepare],
    *,
    repeats: int,
    on_progress: ProgressCallback,
    measure_error: MeasureError | None = None,
) -> dict[str, Row]:
    """Every peer's row, made from `row`. The first call of each is its warm-up, and is where its error is measured.

    After it a peer is timed once at once, so that a run that is cut short has something of it; the rounds replace that.
    """
    ready: dict[str, Candidate] = {}
    rows: dict[str, Row] = {}
    for peer, prepare in peers.items():
        own = dataclasses.replace(row, peer=peer)
        on_progress.note(f"{_label(own)}: first call")
        try:
            candidate = prepare()
            seconds, output = _timed(candidate.call)
            own = dataclasses.replace(own, first_s=seconds, facts=dict(candidate.facts))
            if measure_error is not None and candidate.read is not None:
                own = dataclasses.replace(own, error=measure_error(candidate.read(output)))
            del output
            if repeats:
                own = dataclasses.replace(own, samples=(_timed(candidate.call)[0],))
                ready[peer] = candidate
        except Exception as error:  # noqa: BLE001 - a peer that cannot run is a result, not the end of the run
            own = failed(own, error)
        rows[peer] = own
        on_progress.row(own)
        _free_memory()
    samples: dict[str, list[float]] = {peer: [] for peer in ready}
    for _ in range(repeats):
        for peer, candidate in list(ready.items()):
            try:
                samples[peer].append(_timed(candidate.call)[0])
                rows[peer] = dataclasses.replace(rows[peer], samples=tuple(samples[peer]))
            except Exception as error:  # noqa: BLE001 - as above
                rows[peer] = failed(rows[peer], error)
                del ready[peer]
            on_progress.row(rows[peer])
    return rows


def measure(
    row: Row,
    call: Callable[[], Any],
    wait: Callable[[Any], None],
    *,
    repeats: int,
    least_s: float,
    on_progress: ProgressCallback,
) -> Row:
    """A short call, repeated within each sample for `least_s`; only the last is waited for, as in a model."""

    def many(count: int) -> None:
        output = None
        for _ in range(count):
            output = call()
        wait(output)

    try:
        first, _ = _timed(lambda: many(1))
        once = min(_timed(lambda: many(1))[0] for _ in range(2))
        count = max(1, round(least_s / max(once, 1e-6)))

        samples = tuple(_timed(lambda: many(count))[0] / count for _ in range(repeats))
        row = dataclasses.replace(row, first_s=first, samples=samples)
    except Exception as error:  # noqa: BLE001 - as above
        row = failed(row, error)
    on_progress.row(row)
    return row


def failed(row: Row, error: BaseException) -> Row:
    said = str(error).strip().splitlines() or [""]
    reason = f"{type(error).__name__}: {said[0]}"
    return dataclasses.replace(
        row, samples=(), failure=reason[:500], traceback="".join(traceback.format_exception(error))[-8000:]
    )


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    output = call()
    return time.perf_counter() - begin, output


def _label(row: Row) -> str:
    return " ".join(filter(None, (row.what, row.size, row.peer)))


def _free_memory() -> None:
    gc.collect()
    free_torch_memory()
