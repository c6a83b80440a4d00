"""The formulas of LoRA and of its relatives LoHa and LoKr: the difference that a module's factors make."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch

Part = Literal[
    "down",
    "middle",
    "up",
    "hada_t1",
    "hada_t2",
    "hada_w1_a",
    "hada_w1_b",
    "hada_w2_a",
    "hada_w2_b",
    "lokr_t2",
    "lokr_w1",
    "lokr_w1_a",
    "lokr_w1_b",
    "lokr_w2",
    "lokr_w2_a",
    "lokr_w2_b",
    "difference",
    "replacement",
    "alpha",
    "magnitude",
    "bias",
]

FORMS: Mapping[str, tuple[tuple[Part, ...], ...]] = {
    "LoRA": (("up", "down"), ("up", "middle", "down")),
    "LoHa": (
        ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
        ("hada_t1", "hada_w1_a", "hada_w1_b", "hada_t2", "hada_w2_a", "hada_w2_b"),
    ),
    "LoKr": (
        ("lokr_w1", "lokr_w2"),
        ("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
        ("lokr_w1", "lokr_t2", "lokr_w2_a", "lokr_w2_b"),
        ("lokr_w1_a", "lokr_w1_b", "lokr_w2"),
        ("lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"),
        ("lokr_w1_a", "lokr_w1_b", "lokr_t2", "lokr_w2_a", "lokr_w2_b"),
    ),
    "difference": (("difference",),),
    "replacement": (("replacement",),),
}
"""The parts of each kind of change, one of the tuples."""

WHOLE: tuple[Part, ...] = ("difference", "replacement")
"""The parts that have the shape of the weight."""

FACTORS = frozenset(part for forms in FORMS.values() for form in forms for part in form) - {*WHOLE}
"""The parts of products."""

_RANKS: tuple[Part, ...] = ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")


def find_rank(shapes: Mapping[Part, tuple[int, ...]]) -> int | None:
    """The rank by which alpha is divided; None for a LoKr of two whole factors, and without a product."""
    shape = next((shapes[part] for part in _RANKS if part in shapes), None)
    return shape[0] if shape else None


def find_form(parts: Collection[Part]) -> tuple[Part, ...] | None:
    """The parts that make the difference; None where one is missing or too many are there."""
    present = {part for part in parts if part not in ("alpha", "magnitude", "bias")}
    return next((form for forms in FORMS.values() for form in forms if present == set(form)), None)


def combine(parts: Mapping[Part, torch.Tensor]) -> torch.Tensor:
    """The difference or replacement, [outputs, inputs…], before its scale. Raises RuntimeError for shapes that do not
    fit."""
    if whole := next((part for part in WHOLE if part in parts), None):
        return parts[whole]
    if "middle" in parts:
        return _product_of_three(parts["up"], parts["middle"], parts["down"])
    if "up" in parts:
        return _product(parts["up"], parts["down"])
    if "hada_w1_a" in parts:
        return _lycoris_product(parts, "hada_w1", "hada_t1") * _lycoris_product(parts, "hada_w2", "hada_t2")
    first = parts["lokr_w1"] if "lokr_w1" in parts else _product(parts["lokr_w1_a"], parts["lokr_w1_b"])
    second = parts["lokr_w2"] if "lokr_w2" in parts else _lycoris_product(parts, "lokr_w2", "lokr_t2")
    return torch.kron(first.reshape(*first.shape, *(1,) * (second.ndim - first.ndim)), second)


def _lycoris_product(parts: Mapping[Any, torch.Tensor], name: str, middle: str) -> torch.Tensor:
    """The product of two matrices, or of three: with a middle one, LyCORIS has the first as [rank, outputs]."""
    first, last = parts[f"{name}_a"], parts[f"{name}_b"]
    return _product_of_three(first.flatten(1).T, parts[middle], last) if middle in parts else _product(first, last)


def _product_of_three(first: torch.Tensor, middle: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The product of matrices, of which the middle one may be the kernel of a convolution."""
    product = torch.tensordot(_product(first, middle), last.flatten(1), dims=([1], [0]))
    return product.movedim(-1, 1).contiguous()  # torch.kron takes views of it


def _product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The product of matrices, of which the second may be the kernel of a convolution."""
    return torch.tensordot(first.flatten(1), second, dims=1)
