"""Weights that consist of several parts, packed so that tp splits each part, and checkpoints with other names than the
module's: tensors are renamed and packed as they are read."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from comfy_tpu.compiler.weights import SourceWrapper, WeightSource


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight that consists of several parts, each of which tp splits by itself.

    The parts of a row-parallel weight belong to its input: they are columns. In the checkpoint's order, tp equal pieces
    of the columns would not be each device's shares of the parts. So columns are loaded in another order: each device's
    share of the first part, then its share of the second. `pack_features` puts the input in the same order, without
    moving anything between devices. The parts of a column-parallel weight belong to its output, which `unpack_features`
    splits again.
    """

    pattern: str
    """A glob of names in the checkpoint."""
    parts: tuple[int, ...]
    """The number of columns, or rows, of each part."""
    dimension: Literal[0, 1] = 1
    """1: columns of a row-parallel weight. 0: rows of a column-parallel weight."""


class ConvertedSource(SourceWrapper):
    """A checkpoint under the module's names, with packed weights."""

    def __init__(
        self, source: WeightSource, *, rename: Callable[[str], str] | None, packed: Sequence[PackedWeight], tp: int
    ) -> None:
        self._packed = packed
        self._tp = tp
        self._names = {rename(name) if rename else name: name for name in source.tensors}
        super().__init__(
            source, {name: dataclasses.replace(source.tensors[own], name=name) for name, own in self._names.items()}
        )

    def read(self, name: str) -> torch.Tensor:
        return pack_weight(name, super().read(self._names[name]), self._packed, self._tp)


def pack_weight(name: str, weight: torch.Tensor, packed: Sequence[PackedWeight], tp: int) -> torch.Tensor:
    """The weight in the order in which a mesh with `tp` computes with it; unchanged if no pattern matches its name."""
    for item in packed:
        if fnmatch.fnmatchcase(name, item.pattern):
            return _pack(weight.split(item.parts, dim=item.dimension), tp, item.dimension)
    return weight


def pack_features(parts: Sequence[torch.Tensor], tp: int) -> torch.Tensor:
    """Concatenates tensors along the last dimension, device by device where tp splits each of them."""
    return _pack(parts, tp, parts[0].ndim - 1)


def unpack_features(packed: torch.Tensor, parts: Sequence[int], tp: int) -> tuple[torch.Tensor, ...]:
    """The inverse of `pack_features`: splits the output of a weight with packed rows into its parts."""
    if tp == 1:
        return packed.split(tuple(parts), dim=-1)
    shares = packed.unflatten(-1, (tp, -1)).split([part // tp for part in parts], dim=-1)
    return tuple(share.flatten(-2) for share in shares)


def _pack(parts: Sequence[torch.Tensor], tp: int, dimension: int) -> torch.Tensor:
    if tp == 1:
        return torch.cat(tuple(parts), dim=dimension)
    shares = [part.unflatten(dimension, (tp, -1)) for part in parts]
    return torch.cat(shares, dim=dimension + 1).flatten(dimension, dimension + 1)
