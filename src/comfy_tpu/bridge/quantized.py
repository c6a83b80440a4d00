"""A linear layer with 8-bit weights, for torch modules."""

from __future__ import annotations

import torch

from comfy_tpu.bridge.environment import environment
from comfy_tpu.bridge.scope import current_trace
from comfy_tpu.kernels.quantized import quantized_linear


class QuantizedLinear(torch.nn.Module):
    """Replaces a `Linear` in a skeleton; computes in traces only."""

    def __init__(self, linear: torch.nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(linear.weight.shape, dtype=dtype, device="meta"))
        self.register_buffer("weight_scale", torch.empty(linear.out_features, dtype=torch.float32, device="meta"))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bridge, placement = environment(), current_trace().placement
        tensors = (x, self.weight, self.weight_scale, self.bias)
        arrays = [None if tensor is None else bridge.as_jax(tensor) for tensor in tensors]
        out = quantized_linear(*arrays, platform="cpu" if placement is None else placement.platform)
        result: torch.Tensor = bridge.as_torch(out)
        return result
