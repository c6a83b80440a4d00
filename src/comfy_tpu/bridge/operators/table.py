"""The operator table and the decorator that fills it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from comfy_tpu.errors import InvalidValueError

Function = TypeVar("Function", bound=Callable[..., Any])

OPERATOR_MODULES = ("attention", "convolution", "normalization", "products", "resampling", "shapes")


@dataclasses.dataclass(frozen=True)
class Operator:
    target: Callable[..., Any]
    function: Callable[..., Any]
    on_torch: bool
    """Written on torch tensors (and may return views of them) instead of on jax arrays."""

    @property
    def defined_at(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"


OPERATORS: dict[Callable[..., Any], Operator] = {}


def operator(*targets: Callable[..., Any], on_torch: bool = False) -> Callable[[Function], Function]:
    """Implements torch operators (`torch.nn.functional.…`, `torch.…`, `torch.ops.aten.…`) in every later trace."""

    def add(function: Function) -> Function:
        for target in targets:
            entry = Operator(target, function, on_torch)
            if target in OPERATORS:
                raise InvalidValueError(
                    f"{target} is implemented by {OPERATORS[target].defined_at} already; "
                    f"remove that one or {entry.defined_at}"
                )
            OPERATORS[target] = entry
        return function

    return add


def load_operators() -> None:
    for module in OPERATOR_MODULES:
        importlib.import_module(f"comfy_tpu.bridge.operators.{module}")
