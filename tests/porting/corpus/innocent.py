"""What looks like a trap and is none: only a Mended."""

import math

import torch
import torch.nn.functional as F


def half_of(count: int) -> int:
    if count > 1:
        return count // 2
    return count


class Mended(torch.nn.Module):
    def __init__(self, flag: bool = True) -> None:
        super().__init__()
        self.flag = flag
        self.gradient_checkpointing = False
        self.proj = torch.nn.Linear(8, 8)
        self.register_buffer("steps", torch.arange(8), persistent=False)
        self.largest = torch.arange(8).max().item()
        self.kept = [value for value in range(4) if value > 1]

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float = 1.0,
        names: tuple[str, ...] = ("a",),
        guidance: float | None = None,
    ) -> torch.Tensor:
        if x is None or mask is not None:
            raise ValueError("no mask is expected here")
        if isinstance(x, torch.Tensor) and x.shape[0] == 1:
            return x
        if not torch.is_tensor(x):
            x = torch.tensor(x)
        if self.training or self.flag is False:
            assert x.max() > 0
            x = x + torch.randn_like(x)
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            x = torch.utils.checkpoint.checkpoint(self.proj, x)
        if scale > 0.5 and x.ndim == 3 and x.size(1) > 2 and x.numel() and len(x) > 1:
            x = x * scale
        if names and "a" in names and self.kept:
            x = x + len(names)
        if guidance:
            x = x * guidance
        chunks = x.chunk(2, dim=-1)
        if chunks:
            x = torch.cat(chunks, dim=-1)
        parts = [part for part in x.split(2, dim=1) if part.shape[1] == 2]
        x = torch.cat(parts, dim=1)
        count = half_of(x.shape[-1])
        lengths = torch.tensor([1, 2])
        if lengths.max() > 1:
            count = int(lengths.max().item()) * count // 2
        first, second = (x.shape[0], x)
        if first > 1:
            x = second
        positions = torch.arange(count, device=x.device) + torch.arange(count)
        x = x[..., :count].repeat(1, 1, math.ceil(8 / count))[..., :8] + positions.sum() + self.largest
        rows = {"x": x}
        if rows["x"].dtype in (torch.float16, torch.bfloat16):
            x = x.to(torch.float32).to(x.dtype)
        with torch.autocast("cuda", enabled=False):
            x = self.proj(x) + self.steps.to(x.dtype)
        out = F.pad(x, (0, 8 - x.shape[-1])) if x.shape[-1] < 8 else x
        return max(out.shape[0], 1) * out
