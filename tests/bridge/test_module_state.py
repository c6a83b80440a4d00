"""What a model keeps for later is not kept beyond its trace."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from comfy_tpu.bridge import TraceContext, build_skeleton, call_module, to_device, to_host


@functools.cache
def table(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device, dtype=torch.float32)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """As diffusers' lru_cache_unless_export."""
    cached = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return cached(*args)

    return wrapper


foreign = functools.cache(operator.neg)
"""As if it were imported."""


class Plain:
    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.tables:
            self.tables.append(table.__wrapped__(3, x.device))
        return self.tables[0]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = [Plain()]
        self.made: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        return x * getattr(self, f"by_{way}")(x)

    def by_attribute(self, x: torch.Tensor) -> torch.Tensor:
        if "table" not in self.made:
            self.made["table"] = table.__wrapped__(3, x.device)
        return self.made["table"]

    def by_object(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain[0](x)

    def by_function(self, x: torch.Tensor) -> torch.Tensor:
        return table(3, x.device)

    def by_method(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(x.device)

    def by_decorated(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept_too(x.device)

    @functools.lru_cache  # noqa: B019 as models have it
    def kept(self, device: torch.device) -> torch.Tensor:
        return table.__wrapped__(3, device)

    @decorated
    def kept_too(self, device: torch.device) -> torch.Tensor:
        return table.__wrapped__(3, device)


@pytest.mark.parametrize("way", ["attribute", "object", "function", "method", "decorated"])
def test_a_second_trace_makes_its_own(way: str) -> None:
    model = build_skeleton(Model)
    program = jax.jit(lambda x: call_module(model, {}, (x, way), context=TraceContext()))
    for rows in (1, 2):  # a program for each size
        x = torch.ones(rows, 3)
        expected = x * torch.arange(3.0)
        assert torch.equal(to_host(program(to_device(x))), expected)
        assert torch.equal(model(x, way), expected), "what PyTorch keeps meanwhile stays PyTorch's"


def test_caches_that_a_file_only_imports_stay() -> None:
    assert foreign.__module__ == "_operator"
    foreign(3)
    jax.eval_shape(
        lambda x: call_module(build_skeleton(Model), {}, (x, "function"), context=TraceContext()), jnp.ones(3)
    )
    assert foreign.cache_info().currsize == 1
    assert table.cache_info().currsize == 0
