"""Tensors of transformers with double blocks in their authors' files, which pack several of diffusers' into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from comfy_tpu.compiler.recorded_tensors import Tensors

Split = Callable[[str, torch.Tensor], Sequence[torch.Tensor]]
"""(part of a name in the table, tensor) -> its pieces."""


def unpack_tensors(tensors: Tensors, packed: Mapping[str, tuple[str, ...]], split: Split) -> Tensors:
    """Splits the tensors whose names have a part in `packed`, and puts the scale of the last norm before its shift.

    `packed`: a part of a name -> what stands for it in the names of the pieces.
    """
    converted: Tensors = {}
    for name, tensor in tensors.items():
        part = next((part for part in packed if part in name), None)
        if part is not None:
            for own, piece in zip(packed[part], split(part, tensor), strict=True):
                converted[name.replace(part, own)] = piece
        elif name.startswith("norm_out.linear."):
            shift, scale = tensor.chunk(2)
            converted[name] = torch.cat((scale, shift))
        else:
            converted[name] = tensor
    return converted
