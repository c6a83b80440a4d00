"""Peers (our program, diffusers as it is, diffusers under torch.compile), and the time each takes.

They are timed in turn, so that a clock that drifts drifts for all of them. A failure becomes a row with its reason.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.bench.machine import Bench, free_device_memory
from comfy_tpu.bench.results import Emit, Row
from comfy_tpu.compiler.program import ProgramEvent
from comfy_tpu.errors import UnsupportedError

_STAGES = {"lowering": "trace_s", "compiling": "lower_s", "ready": "compile_s"}
"""An event carries the seconds of the stage before it."""


@dataclasses.dataclass
class Candidate:
    """A peer that is ready for its first call. The call returns when the device is done."""

    call: Callable[[], Any]
    read: Callable[[Any], torch.Tensor] | None = None
    """The output of the call -> a tensor that can be compared."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """May grow while the call runs."""


Prepare = Callable[[], Candidate]
OnEvent = Callable[[ProgramEvent], None]
MeasureError = Callable[[torch.Tensor], float]


def measure_peers(
    bench: Bench,
    row: Row,
    *,
    ours: Mapping[str, Prepare],
    by_torch: Mapping[str, Callable[[], Callable[[], torch.Tensor]]],
    sdpa: str = "",
    repeats: int | None = None,
    measure_error: MeasureError | None = None,
) -> None:
    """Emits rows of those of the peers that the job asks for. `by_torch` makes the calls of torch's peers, whose
    attention is by the backend `sdpa`."""

    def prepare(make_call: Callable[[], Callable[[], torch.Tensor]]) -> Prepare:
        return lambda: torch_candidate(bench, make_call(), sdpa=sdpa, facts=row.facts)

    peers = {**ours, **{peer: prepare(make_call) for peer, make_call in by_torch.items()}}
    time_interleaved(
        row,
        {peer: peers[peer] for peer in bench.job.candidates},
        repeats=bench.job.repeats if repeats is None else repeats,
        emit=bench.emit,
        measure_error=measure_error,
    )


def time_interleaved(
    row: Row,
    peers: Mapping[str, Prepare],
    *,
    repeats: int,
    emit: Emit,
    measure_error: MeasureError | None = None,
) -> dict[str, Row]:
    """Every peer's row, made from `row`. The first call of each is its warm-up, and is where its error is measured.

    After it a peer is timed once at once, so that a run that is cut short has something of it; the rounds replace that.
    """
    ready: dict[str, Candidate] = {}
    rows: dict[str, Row] = {}
    for peer, prepare in peers.items():
        own = dataclasses.replace(row, peer=peer)
        emit(" ".join(filter(None, (own.what, own.size, own.peer))) + ": first call")
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
            own = own.with_failure(error)
        rows[peer] = own
        emit(own)
        free_device_memory()
    samples: dict[str, list[float]] = {peer: [] for peer in ready}
    for _ in range(repeats):
        for peer, candidate in list(ready.items()):
            try:
                samples[peer].append(_timed(candidate.call)[0])
                rows[peer] = dataclasses.replace(rows[peer], samples=tuple(samples[peer]))
            except Exception as error:  # noqa: BLE001 - as above
                rows[peer] = rows[peer].with_failure(error)
                del ready[peer]
            emit(rows[peer])
    return rows


def time_repeated(
    row: Row, call: Callable[[], Any], wait: Callable[[Any], None], *, repeats: int, least_s: float, emit: Emit
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
        row = row.with_failure(error)
    emit(row)
    return row


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    output = call()
    return time.perf_counter() - begin, output


def stage_clock(facts: dict[str, Any]) -> OnEvent:
    """Adds up the seconds of each stage of making programs, in `facts`."""

    def on_event(event: ProgramEvent) -> None:
        if name := _STAGES.get(event.stage):
            facts[name] = facts.get(name, 0.0) + event.seconds
        if event.stage == "ready":
            facts["programs"] = facts.get("programs", 0) + 1
            facts["from_cache"] = facts.get("from_cache", True) and event.from_cache

    return on_event


def torch_candidate(
    bench: Bench, call: Callable[[], torch.Tensor], *, sdpa: str = "", facts: Mapping[str, Any]
) -> Candidate:
    if refusal := bench.torch_refusal:
        raise UnsupportedError(refusal)

    def run() -> torch.Tensor:
        with torch.no_grad(), prefer_attention(sdpa):
            output = call()
        bench.synchronize()
        return output

    return Candidate(run, lambda output: output, {"sdpa": sdpa or "torch's choice", **facts})


def compile_module(module: Any, parts: Sequence[str] = ()) -> Any:
    """The module under torch.compile, with the same weights; with `parts`, only these submodules, each by itself."""
    torch._dynamo.reset()
    if not parts:
        return torch.compile(module, dynamic=False)
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name in parts:
        part = twin._modules[name]
        if isinstance(part, torch.nn.ModuleList):
            blocks: list[Any] = [torch.compile(block, dynamic=False) for block in part]
            twin._modules[name] = torch.nn.ModuleList(blocks)
        else:
            twin._modules[name] = torch.compile(part, dynamic=False)
    return twin


@contextlib.contextmanager
def prefer_attention(name: str) -> Iterator[None]:
    """torch's attention by the named backend where it takes the call, else by whichever of the others does."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not name:
        yield
        return
    others = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    order = [getattr(SDPBackend, other) for other in (name, *(other for other in others if other != name))]
    with sdpa_kernel(order, set_priority=True):
        yield
