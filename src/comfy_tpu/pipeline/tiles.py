"""What the devices do around the transformer where it looks at tiles: cut them out, and blend their velocities."""

from __future__ import annotations

from typing import Any

import torch


def gather_tiles(
    module: Any, video: torch.Tensor, frames: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """[videos, channels, all frames, …] and the frames, rows and columns of each tile, [tiles, n] -> [tiles · videos,
    channels, frames, rows, columns]."""
    places = zip(frames, rows, columns, strict=True)
    return torch.cat([video.index_select(2, f).index_select(3, r).index_select(4, c) for f, r, c in places])


def add_tiles(
    module: Any,
    velocity: torch.Tensor,
    kept: torch.Tensor,
    windows: torch.Tensor,
    frames: torch.Tensor,
    shares: torch.Tensor,
    rows: torch.Tensor,
    row_shares: torch.Tensor,
    columns: torch.Tensor,
    column_shares: torch.Tensor,
) -> torch.Tensor:
    """`kept` times the video's velocity (0: it is that of an earlier step), with those of tiles added.

    `windows` as in `gather_tiles`; `shares`, `row_shares`, `column_shares`: weights, [tiles, n], whose product counts.
    """
    count = len(frames)
    weights = (shares.view(count, 1, 1, -1, 1, 1), row_shares.view(count, 1, 1, 1, -1, 1), column_shares)
    parts = windows.unflatten(0, (count, -1)) * weights[0] * weights[1] * weights[2].view(count, 1, 1, 1, 1, -1)
    made, (height, width) = kept * velocity, velocity.shape[3:]
    for number in range(count):
        part = parts[number]
        wide = part.new_zeros(*part.shape[:4], width).index_add(4, columns[number], part)
        tall = part.new_zeros(*part.shape[:3], height, width).index_add(3, rows[number], wide)
        made = made.index_add(2, frames[number], tall)
    return made
