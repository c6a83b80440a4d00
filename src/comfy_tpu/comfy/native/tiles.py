"""Tiles of any size in one program: a smaller tile is padded, and its padding is invisible to every layer.

ComfyUI's tiles end where the image does, so those at two of its borders are smaller. What a VAE computes in a tile
depends on where it ends: convolutions see zeros there, norms and attention go over the whole tile. So padding is set to
zero before each convolution, and left out of the statistics of norms and of the keys of attention. The results are
those of the smaller tile.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from comfy_tpu.errors import UnsupportedError

TILED_METHODS = ("decode_tiled_", "encode_tiled_")
"""ComfyUI's methods that cut an image into tiles."""
KNOWN_LAYERS = frozenset(
    {"Conv2d", "GroupNorm", "SiLU", "Dropout", "Identity", "ModuleList", "Module", "Encoder", "Decoder", "ResnetBlock"}
    | {"AttnBlock", "Upsample", "Downsample", "AutoencoderKL", "AutoencodingEngine", "DiagonalGaussianRegularizer"}
    | {"AutoencodingEngineLegacy", "BatchNorm2d"}
)
"""Classes of layers that are known to mix pixels by convolutions, group norms and attention only."""

_in_tiles = contextvars.ContextVar("comfy_tpu tiles", default=False)


def is_in_tiles() -> bool:
    """Whether ComfyUI cuts an image into tiles now."""
    return _in_tiles.get()


def mark_tiles(vae: Any) -> None:
    """Lets `is_in_tiles` know of a VAE's tiles. Of the class, so that copies of the VAE have their own methods."""
    kind: Any = type(vae)
    vae.__class__ = _marked_class(kind)


@functools.cache
def _marked_class(kind: type) -> type:
    if getattr(kind, "marks_tiles", False):
        return kind
    methods = {name: _marked(getattr(kind, name)) for name in TILED_METHODS if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {**methods, "marks_tiles": True, "__module__": kind.__module__})


def _marked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _in_tiles.set(True)
        try:
            return method(*args, **kwargs)
        finally:
            _in_tiles.reset(token)

    return run


def can_pad_tiles(module: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether every layer of a VAE is one whose padding can be hidden, and every level has whole pixels.

    `x`: [batch, channels, height, width]
    """
    names = [type(part).__name__ for part in module.modules()]
    divisor = 2 ** names.count("Downsample") if x.shape[1] == 3 else 1
    whole = x.ndim == 4 and not any(side % divisor for side in x.shape[2:])
    return whole and KNOWN_LAYERS.issuperset(names)


class HiddenPadding(TorchFunctionMode):
    """Inside a trace: layers compute as if an image ended where its padding begins."""

    def __init__(self, padded: tuple[int, int], sides: torch.Tensor) -> None:
        """`padded`: height and width of the input with padding; `sides`: int [2], height and width without it."""
        super().__init__()
        self._padded = padded
        self._sides = sides

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SEES_NEIGHBOURS:
            image, *rest = args
            return func(self._zero(image), *rest, **kwargs)
        if func in _GROUP_NORMS:
            return self._group_norm(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _mask(self, height: int, width: int) -> torch.Tensor:
        """bool [height, width] of an image at any scale: True where it is not padding."""
        rows, columns = (
            torch.arange(now, device=self._sides.device) * padded < self._sides[index] * now
            for index, (now, padded) in enumerate(zip((height, width), self._padded, strict=True))
        )
        return rows[:, None] & columns

    def _zero(self, image: torch.Tensor) -> torch.Tensor:
        mask = self._mask(*image.shape[-2:])
        return torch.where(mask, image, torch.zeros((), dtype=image.dtype, device=image.device))

    def _group_norm(
        self,
        x: torch.Tensor,
        num_groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> torch.Tensor:
        batch, channels, height, width = x.shape
        mask = self._mask(height, width)
        values = x.float().reshape(batch, num_groups, channels // num_groups, height, width)
        count = mask.sum() * (channels // num_groups)
        zero = torch.zeros((), device=x.device)
        mean = torch.where(mask, values, zero).sum((2, 3, 4), keepdim=True) / count
        centered = values - mean
        variance = torch.where(mask, centered * centered, zero).sum((2, 3, 4), keepdim=True) / count
        out = (centered * torch.rsqrt(variance + eps)).reshape(x.shape)
        if weight is not None:
            out = out * weight.float().view(-1, 1, 1)
        if bias is not None:
            out = out + bias.float().view(-1, 1, 1)
        return out.to(x.dtype)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        height, width = self._padded
        scale = round((k.shape[2] / (height * width)) ** 0.5 * 64) / 64
        rows, columns = round(height * scale), round(width * scale)
        if rows * columns != k.shape[2] or options.get("attn_mask") is not None:
            raise UnsupportedError(f"an attention over {k.shape[2]} pixels of {height}×{width}")
        mask = self._mask(rows, columns).flatten()[None, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **{**options, "attn_mask": mask})


# An image that `pad` has given a border of zeros is a pixel wider than a scaled one; the mask then includes the first
# row and column of zeros, and leaves out others.
_SEES_NEIGHBOURS = (torch.conv2d, torch.nn.functional.conv2d, torch.nn.functional.pad)
_GROUP_NORMS = (torch.group_norm, torch.nn.functional.group_norm)
