"""Calls with evaluated arguments, and what calls of Python's, numpy's and torch's global functions return."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable

from comfy_tpu.porting.values import UNKNOWN, Value, combine, known_truth, sequence
from comfy_tpu.porting.vocabulary import FALSE_ON_TPU, HARMLESS_CUDA, HARMLESS_DISTRIBUTED, TO_NUMBER_FUNCTIONS


@dataclasses.dataclass
class Call:
    """A call, and the traps that its evaluation found."""

    node: ast.Call
    arguments: list[Value]
    keywords: dict[str, Value]
    """By name; `**` for unpacked ones."""
    building: bool = False
    """Whether the call is part of a model's construction."""
    traps: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)
    """Name and reason; None: the trap's usual reason."""

    def report(self, trap: str, reason: str | None = None) -> None:
        self.traps.append((trap, reason))

    @property
    def first(self) -> Value:
        return self.arguments[0] if self.arguments else UNKNOWN

    @property
    def values(self) -> list[Value]:
        return [*self.arguments, *self.keywords.values()]

    def keyword_source(self, name: str) -> ast.expr | None:
        return next((keyword.value for keyword in self.node.keywords if keyword.arg == name), None)


def call_global(name: str, call: Call) -> Value | None:
    """The result of calling a function by its dotted name; None if the name is not in these tables."""
    if name in FALSE_ON_TPU:
        return known_truth(False)
    for prefix, rule in _PREFIXES.items():
        if name.startswith(prefix):
            return rule(name, call)
    if name in TO_NUMBER_FUNCTIONS:
        if any(value.is_traced for value in call.arguments):
            call.report("tensor-to-number")
        return UNKNOWN
    builtin = _BUILTINS.get(name)
    return None if builtin is None else builtin(call)


def _cuda(name: str, call: Call) -> Value:
    if name.split(".")[2] not in HARMLESS_CUDA:
        call.report("cuda", f"{name} is called, which fails where there is no NVIDIA GPU")
    return UNKNOWN


def _distributed(name: str, call: Call) -> Value:
    if name.split(".")[2] not in HARMLESS_DISTRIBUTED:
        call.report("distributed")
    return call.first if call.first.is_traced else UNKNOWN


def _random(name: str, call: Call) -> Value:
    call.report("python-random")
    return UNKNOWN


_PREFIXES: dict[str, Callable[[str, Call], Value]] = {
    "torch.cuda.": _cuda,
    "torch.distributed.": _distributed,
    "random.": _random,
    "numpy.random.": _random,
    "einops.": lambda name, call: combine(*call.arguments),
}


def _isinstance(call: Call) -> Value:
    if call.first.is_tensor and len(call.node.args) == 2:
        return known_truth("Tensor" in ast.unparse(call.node.args[1]))
    return UNKNOWN


def _any(call: Call) -> Value:
    if call.first.item is not None and call.first.item.is_traced:
        call.report("tensor-condition")
    return UNKNOWN


def _same_items(call: Call) -> Value:
    return call.arguments[0] if call.arguments else Value(item=UNKNOWN)


_BUILTINS: dict[str, Callable[[Call], Value]] = {
    "isinstance": _isinstance,
    "hasattr": lambda call: UNKNOWN,
    "any": _any,
    "all": _any,
    "sum": lambda call: call.first.item or UNKNOWN,
    **dict.fromkeys(("list", "tuple", "reversed", "sorted", "iter"), _same_items),
    "zip": lambda call: Value(item=sequence([value.iterated for value in call.arguments])),
    "enumerate": lambda call: Value(item=sequence([UNKNOWN, call.first.iterated])),
}
