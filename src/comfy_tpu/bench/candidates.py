"""The ways to run a module: our program, diffusers as it is, and diffusers under torch.compile."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.bench.devices import Bench
from comfy_tpu.bench.job import Job
from comfy_tpu.bench.timing import Candidate, Prepare
from comfy_tpu.compiler.program import ProgramEvent
from comfy_tpu.errors import UnsupportedError

_STAGES = {"lowering": "trace_s", "compiling": "lower_s", "ready": "compile_s"}
"""An event carries the seconds of the stage before it."""


class StageClock:
    """Adds up the seconds of each stage of making programs."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def __call__(self, event: ProgramEvent) -> None:
        if name := _STAGES.get(event.stage):
            self._facts[name] = self._facts.get(name, 0.0) + event.seconds
        if event.stage == "ready":
            self._facts["programs"] = self._facts.get("programs", 0) + 1
            self._facts["from_cache"] = self._facts.get("from_cache", True) and event.from_cache


def torch_candidate(
    bench: Bench,
    call: Callable[[], torch.Tensor],
    *,
    read: Callable[[Any], torch.Tensor] | None = None,
    attention: str = "",
    facts: Mapping[str, Any] | None = None,
) -> Candidate:
    if refusal := bench.torch_refusal:
        raise UnsupportedError(refusal)

    def run() -> torch.Tensor:
        with torch.no_grad(), prefer_attention(attention):
            output = call()
        bench.synchronize()
        return output

    return Candidate(run, read or (lambda output: output), {"sdpa": attention or "torch's choice", **(facts or {})})


def compiled(module: torch.nn.Module, parts: Sequence[str] = ()) -> Any:
    """The module under torch.compile, with the same weights; with `parts`, only these submodules, each by itself."""
    torch._dynamo.reset()
    if not parts:
        return torch.compile(module, dynamic=False)
    twin: Any = copy.copy(module)
    twin._modules = dict(module._modules)
    for name in parts:
        part = twin._modules[name]
        if isinstance(part, torch.nn.ModuleList):
            blocks: list[Any] = [torch.compile(block, dynamic=False) for block in part]
            twin._modules[name] = torch.nn.ModuleList(blocks)
        else:
            twin._modules[name] = torch.compile(part, dynamic=False)
    return twin


def choose(job: Job, prepare: Mapping[str, Prepare]) -> dict[str, Prepare]:
    return {peer: prepare[peer] for peer in job.candidates}


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
