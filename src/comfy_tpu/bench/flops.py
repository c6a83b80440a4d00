"""Operations of one call, counted as the literature does: a multiplication and an addition are two.

The transformer's are a formula, so that attention and everything else can be held against their own ceilings. With L
video tokens, T text tokens, width d, feed-forward width f and N blocks, one forward of one sample is

    attention   N · (4 L² d + 4 L T d)                              scores and weighted sums, self and cross
    linear      N · (12 L d² + 4 T d² + 4 L d f) + outside          q k v o; cross q o; cross k v; feed-forward

where `outside` is the patch, text and time embeddings and the output projection (less than 0.1 % of the 14B at 480p).
Norms, RoPE and softmax are not counted: they are what an implementation should make vanish. The other models are
counted operator by operator with torch's own counter, on meta tensors: convolutions, products and attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Operations:
    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention


def transformer_operations(config: Mapping[str, Any], tokens: int, text_tokens: int) -> Operations:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    patch = math.prod(config["patch_size"])
    blocks = config["num_layers"]
    attention = 4 * tokens**2 * width + 4 * tokens * text_tokens * width
    linear = 12 * tokens * width**2 + 4 * text_tokens * width**2 + 4 * tokens * width * config["ffn_dim"]
    outside = 2 * tokens * width * patch * (config["in_channels"] + config["out_channels"])
    outside += 2 * text_tokens * (config["text_dim"] * width + width**2)
    outside += 2 * (config["freq_dim"] * width + width**2 + 6 * width**2)
    return Operations(linear=float(blocks * linear + outside), attention=float(blocks * attention))


def attention_operations(heads: int, tokens: int, head_dim: int) -> float:
    return 4.0 * heads * tokens**2 * head_dim


def counted_operations(module: torch.nn.Module, call: Callable[[torch.nn.Module], Any]) -> float:
    """Of `call(module)`, where the module's weights are on meta and `call` makes meta inputs."""
    from torch.utils.flop_counter import FlopCounterMode

    module = module.to("meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(module)
    return float(counter.get_total_flops())
