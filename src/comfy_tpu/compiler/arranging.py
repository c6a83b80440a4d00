"""Checkpoints whose tensors are called or laid out otherwise than the module's: put right as they are read."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from comfy_tpu.compiler.weights import SourceAround, WeightSource


@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight that is several parts in one, each of them split over tp by itself.

    Of a row-parallel weight the parts are of its input: columns. Cut into tp equal pieces as it is, a device's columns
    would not be those of its share of the parts. So columns are loaded in another order: each device's share of the
    first part, then its share of the second. `pack_features` puts the input in the same order, without moving anything
    between devices. Of a column-parallel weight the parts are of its output, and `unpack_features` takes that apart.
    """

    pattern: str
    """A glob of names in the checkpoint."""
    parts: tuple[int, ...]
    """How many columns each has, or rows."""
    dimension: Literal[0, 1] = 1
    """1: columns, of a row-parallel weight. 0: rows, of a column-parallel one."""


class ArrangedSource(SourceAround):
    """A checkpoint under the module's names, with packed columns."""

    def __init__(
        self, source: WeightSource, *, rename: Callable[[str], str] | None, packed: Sequence[Packed], tp: int
    ) -> None:
        self._packed = packed
        self._tp = tp
        self._names = {rename(name) if rename else name: name for name in source.tensors}
        super().__init__(
            source, {name: dataclasses.replace(source.tensors[own], name=name) for name, own in self._names.items()}
        )

    def read(self, name: str) -> torch.Tensor:
        return packed_columns(name, super().read(self._names[name]), self._packed, self._tp)


def packed_columns(name: str, weight: torch.Tensor, packed: Sequence[Packed], tp: int) -> torch.Tensor:
    """The weight of this name as a mesh with `tp` computes with it."""
    for item in packed:
        if fnmatch.fnmatchcase(name, item.pattern):
            return _packed(weight.split(item.parts, dim=item.dimension), tp, item.dimension)
    return weight


def pack_features(parts: Sequence[torch.Tensor], tp: int) -> torch.Tensor:
    """Tensors one behind the other in the last dimension, device by device where tp splits each of them."""
    return _packed(parts, tp, parts[0].ndim - 1)


def unpack_features(packed: torch.Tensor, parts: Sequence[int], tp: int) -> tuple[torch.Tensor, ...]:
    """What `pack_features` was made of, each in its own order: what a weight with packed rows answers."""
    if tp == 1:
        return packed.split(tuple(parts), dim=-1)
    shares = packed.unflatten(-1, (tp, -1)).split([part // tp for part in parts], dim=-1)
    return tuple(share.flatten(-2) for share in shares)


def _packed(parts: Sequence[torch.Tensor], tp: int, dimension: int) -> torch.Tensor:
    if tp == 1:
        return torch.cat(tuple(parts), dim=dimension)
    shares = [part.unflatten(dimension, (tp, -1)) for part in parts]
    return torch.cat(shares, dim=dimension + 1).flatten(dimension, dimension + 1)
