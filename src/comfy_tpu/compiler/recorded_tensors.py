"""Checkpoints under other names: a conversion is recorded on tensors without data, and carried out tensor by tensor.

Converters are written for whole dictionaries of tensors: they rename, split and join. Here they run once, on meta
tensors that record every operation. What a converted tensor needs is read from the file when it is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from comfy_tpu.compiler.weights import SourceWrapper, WeightSource
from comfy_tpu.errors import UnsupportedError

Tensors = dict[str, torch.Tensor]
_Compute = Callable[[Callable[[str], torch.Tensor]], torch.Tensor]


class RecordedTensor(torch.Tensor):
    """A tensor without data: its shape and dtype, and how it is computed from tensors of a checkpoint."""

    compute: _Compute
    """(reads a tensor of the checkpoint by its name) -> this tensor with its data."""
    sources: tuple[str, ...]
    """The tensors of the checkpoint that `compute` reads."""

    @classmethod
    def make(cls, meta: torch.Tensor, compute: _Compute, sources: tuple[str, ...]) -> RecordedTensor:
        tensor: RecordedTensor = torch.Tensor._make_subclass(cls, meta)
        tensor.compute, tensor.sources = compute, sources
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")):
            raise UnsupportedError(f"a conversion of names changes tensors in place ({name}); copy them first")
        given = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, RecordedTensor)]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if any(result is each for each in given):  # .float() of float32
            return result
        sources = tuple(dict.fromkeys(name for each in given for name in each.sources))

        def computed(pick: Callable[[Any], torch.Tensor]) -> _Compute:
            def compute(read: Callable[[str], torch.Tensor]) -> torch.Tensor:
                def value(each: Any) -> Any:
                    return each.compute(read) if isinstance(each, RecordedTensor) else each

                real_args, real_kwargs = _pytree.tree_map(value, (args, kwargs or {}))
                return pick(func(*real_args, **real_kwargs))

            return compute

        if isinstance(result, torch.Tensor):
            return cls.make(result, computed(lambda made: made), sources)
        if isinstance(result, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in result):
            return type(result)(
                cls.make(each, computed(lambda made, at=at: made[at]), sources)  # type: ignore[misc]
                for at, each in enumerate(result)
            )
        return result


def record_tensors(source: WeightSource) -> Tensors:
    """The tensors of a checkpoint without their data, to be converted."""

    def stored(name: str) -> RecordedTensor:
        info = source.tensors[name]
        return RecordedTensor.make(
            torch.empty(info.shape, dtype=info.dtype, device="meta"), lambda read: read(name), (name,)
        )

    return {name: stored(name) for name in source.tensors}


class RecordedSource(SourceWrapper):
    """A checkpoint whose tensors are computed as they are read, from those of another one."""

    def __init__(self, source: WeightSource, recorded: Mapping[str, torch.Tensor]) -> None:
        self._recorded = {name: tensor for name, tensor in recorded.items() if isinstance(tensor, RecordedTensor)}
        order = {name: number for number, name in enumerate(source.tensors)}
        names = sorted(self._recorded, key=lambda name: order[self._recorded[name].sources[0]])
        super().__init__(
            source,
            {
                name: dataclasses.replace(
                    source.tensors[self._recorded[name].sources[0]],
                    name=name,
                    shape=tuple(self._recorded[name].shape),
                    dtype=self._recorded[name].dtype,
                )
                for name in names
            },
        )
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str) -> torch.Tensor:
        return self._recorded[name].compute(self._read_source)

    def close(self) -> None:
        self._last = None
        super().close()

    def _read_source(self, name: str) -> torch.Tensor:
        # Queries, keys and values are often one tensor of the file, and asked for one after the other.
        if self._last is None or self._last[0] != name:
            self._last = name, super().read(name)
        return self._last[1]
