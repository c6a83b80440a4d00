"""A checkpoint of zeros, for runs whose results do not matter."""

from __future__ import annotations

import torch

from comfy_tpu.compiler.weights import SourceWrapper


class BlankSource(SourceWrapper):
    """A checkpoint with its names, shapes and dtypes, and zeros for values: nothing but its headers is read."""

    def read(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        return torch.zeros(info.shape, dtype=info.dtype)
