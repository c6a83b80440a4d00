"""The traps: what each is called, what it does to a model on a TPU, and what to try instead.

What they do was tried on the bridge, not taken from torchax's or the guide's word: a mask may be written through, an
arange without a device becomes a constant, and `.to("cuda")` of a traced tensor goes nowhere. None of these is here.
"""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Sequence
from typing import Any, Literal

from comfy_tpu.errors import GUIDE, Section

Severity = Literal["stops", "changes", "costs"]

SEVERITIES: dict[Severity, str] = {
    "stops": "stops the trace",
    "changes": "changes the result",
    "costs": "costs memory or time",
}


@dataclasses.dataclass(frozen=True)
class Trap:
    name: Section
    severity: Severity
    reason: str
    fix: str


_TRAPS: dict[Severity, dict[Section, tuple[str, str]]] = {
    "stops": {
        "tensor-condition": (
            "a branch is taken by the value of a tensor, which a compiled program knows only while it runs",
            "compute both sides and choose with torch.where, or decide outside and pass a Python bool",
        ),
        "tensor-assert": (
            "an assert reads the value of a tensor, which a compiled program knows only while it runs",
            "check before the model is called, or check shapes and dtypes instead",
        ),
        "tensor-to-number": (
            "a Python number is made of a tensor, whose value a compiled program knows only while it runs",
            "keep it a tensor, or compute the number outside and pass it as a Python argument",
        ),
        "mask-indexing": (
            "indexing by a boolean mask gives as many rows as the mask has true values, and shapes must be known",
            "keep all rows and use torch.where(mask[..., None], x, 0), or gather by a fixed number of indices",
        ),
        "data-dependent-shape": (
            "the shape of the result depends on values of a tensor, and shapes must be known when compiling",
            "compute it outside and pass the result as an input, or use a form of fixed size (torch.where, topk)",
        ),
        "cuda": (
            "torch.cuda is started, which fails where there is no NVIDIA GPU",
            "take devices from the inputs (x.device), and put the call behind `if torch.cuda.is_available()`",
        ),
        "distributed": (
            "torch.distributed is used without asking whether it was started, and here it never is",
            "put it behind `if torch.distributed.is_initialized()`; the mesh and the sharding rules do this work here",
        ),
        "gpu-only-import": (
            "a library of GPU kernels is imported, and cannot be installed on a TPU machine",
            "import it in a try, and call torch.nn.functional.scaled_dot_product_attention, which becomes a TPU kernel",
        ),
        "host-tensor-written": (
            "a tensor is made on the host, for want of a device, and then written with values of the program",
            "make it where the input is: torch.zeros(..., device=x.device)",
        ),
        "random-in-forward": (
            "random numbers are drawn inside the model: compiled, they would be the same in every run",
            "draw them outside and pass them as an input",
        ),
        "kept-tensor": (
            "a tensor that an earlier trace left behind is used (a global, or a cache of another file): the program "
            "for the next size cannot be made",
            "compute it in __init__ and register it as a buffer, or compute it in every forward: that is once a "
            "program",
        ),
        "large-constant": (
            "a large tensor is made on the host, and would become a constant of the program",
            "register it as a buffer, pass it as an input, or make it on the device: device=x.device",
        ),
        "meta-tensor": (
            "a tensor without data is used: it is neither a weight nor a buffer that was loaded",
            'register it: self.register_buffer("table", table, persistent=False)',
        ),
        "shared-memory": (
            "a tensor is written to that may share its memory with another one",
            "write .clone() if it is to be a copy, .view() if it is not",
        ),
        "results": (
            "the model returns something else than tensors and numbers in tuples, lists and dicts",
            "return a tuple, or pass return_dict=False if it has that",
        ),
        "missing-operator": (
            "neither torchax nor comfy-tpu implements the operator",
            "write it with others, or add it in comfy_tpu/bridge/operators/",
        ),
        "trace": (
            "the model cannot be traced",
            "change the line, or replace the module that it stands in",
        ),
        "lowering": (
            "the program cannot be lowered for a TPU",
            "write the part with other operators",
        ),
    },
    "changes": {
        "python-random": (
            "Python or numpy draws a random number once, while the program is traced, and every run then uses that one",
            "draw it outside and pass it as an input",
        ),
        "float64": (
            "float64 on the device is float32: the digits that were asked for are not there",
            "compute in float64 on the host in __init__ and register the result as a buffer, or ask for float32",
        ),
        "parity": (
            "the compiled program does not compute what PyTorch does",
            "compare the modules one by one with call_module, and report the operator that differs",
        ),
    },
    "costs": {
        "complex": (
            "complex numbers are pairs of float32 on a TPU: twice the memory of bfloat16, and no use of the "
            "matrix unit",
            "rotate by cos and sin on real tensors",
        ),
        "strided-write": (
            "a write to every second element is a pad and a select of the whole tensor (a forward of a 14B model took "
            "3.47 s when it was a scatter, and takes 2.71 s without)",
            "compute the parts and join them: torch.stack((even, odd), dim=-1).flatten(-2)",
        ),
        "square-mask": (
            "a mask of queries by keys grows with the square of the tokens (75,600 of them: 5.7 GB in bool)",
            "pass a mask of keys only, [batch, 1, 1, keys], or is_causal=True",
        ),
        "dtype-drift": (
            "with weights and inputs in bfloat16 the result is not bfloat16, so all that follows takes twice the "
            "memory",
            "convert back where the precision is no longer needed: .to(hidden_states.dtype)",
        ),
        "uneven-blocks": (
            "the blocks of the list differ, so they cannot run as one scanned layer: tracing and compiling grow "
            "with them",
            "give every block the same attributes, or accept one copy of the program for each",
        ),
        "no-sharding-rule": (
            "no sharding rule knows these weights, so every device would hold all of them",
            "write a rule for each in the family: column, row, gather or replicate",
        ),
    },
}
"""Reason and fix of every trap."""

TRAPS: dict[str, Trap] = {
    name: Trap(name, severity, *texts) for severity, traps in _TRAPS.items() for name, texts in traps.items()
}


@dataclasses.dataclass(frozen=True)
class Finding:
    trap: str
    severity: Severity
    file: str
    line: int
    code: str
    reason: str
    fix: str
    reached: bool | None = None
    """Whether the trial ran the line; None without a trial."""

    @property
    def place(self) -> str:
        """Empty where no line of the model's did it."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def guide(self) -> str:
        """Where the trap is explained."""
        return f"{GUIDE}#{self.trap}"


def find_trap(trap: str, place: Sequence[Any] | None, reason: str | None = None, fix: str | None = None) -> Finding:
    """The finding of a trap at a file and line; `reason` and `fix` replace the trap's usual ones."""
    known = TRAPS[trap]
    file, line = place[:2] if place else ("", 0)
    linecache.checkcache(file)
    code = linecache.getline(file, line).strip()
    return Finding(trap, known.severity, file, line, code, reason or known.reason, fix or known.fix)
