"""Latents to frames, one latent frame at a time or all together; in tiles where a whole picture does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from comfy_tpu.bridge import to_host
from comfy_tpu.errors import DeviceMemoryError

logger = logging.getLogger(__name__)

DecodeFrame = Callable[[torch.Tensor, object], tuple[object, object]]
"""(latent frames, cache or None) -> (frames, cache), arrays still on the devices."""

TILE = 32
"""Side of a tile in latents: 256 pixels, as diffusers tiles the Wan VAE."""
OVERLAP = 8
"""What neighbouring tiles share, and blend over."""


def _no_cache(frames: int) -> object:
    return None


def decode_frames(
    decode_frame: DecodeFrame,
    latents: torch.Tensor,
    first_cache: Callable[[int], object] = _no_cache,
    *,
    whole: bool = False,
) -> Iterator[torch.Tensor]:
    """[batch, t, height, width, 3] in 0..1 for each latent frame of [batch, channels, frames, height, width]; of all
    of them at once if `whole`.

    If the first two latent frames do not fit in device memory, every frame is decoded in tiles instead: the cache has
    its full size after two.
    """
    ahead: list[torch.Tensor] = []
    begun = False
    try:
        cache = first_cache(latents.shape[2])
        for index, latent in enumerate(_parts(latents, whole)):
            frames, cache = decode_frame(latent, cache)
            ahead.append(to_host(frames, consume=True))
            if index >= 1:
                begun = True
                yield from ahead
                ahead.clear()
        yield from ahead
    except DeviceMemoryError as error:
        if max(latents.shape[3:]) <= TILE or begun:
            raise
        logger.warning("decoding whole frames did not fit in device memory; decoding in tiles instead (%s)", error)
        del cache
        yield from decode_tiles(decode_frame, latents, first_cache, whole=whole)


def decode_tiles(
    decode_frame: DecodeFrame,
    latents: torch.Tensor,
    first_cache: Callable[[int], object] = _no_cache,
    *,
    whole: bool = False,
) -> Iterator[torch.Tensor]:
    """The same in overlapping tiles of one size, which is one program; neighbours are blended over their overlap."""
    height, width = latents.shape[3:]
    rows, columns = tile_starts(height), tile_starts(width)
    tiles = [(row, column) for row in rows for column in columns]
    caches = {tile: first_cache(latents.shape[2]) for tile in tiles}
    for latent in _parts(latents, whole):
        total: torch.Tensor | None = None
        weight: torch.Tensor | None = None
        for row, column in tiles:
            part = latent[..., row : row + TILE, column : column + TILE]
            array, caches[row, column] = decode_frame(part, caches[row, column])
            frames = to_host(array, consume=True)
            scale = frames.shape[2] // part.shape[3]
            if total is None or weight is None:
                total = torch.zeros(*frames.shape[:2], height * scale, width * scale, 3)
                weight = torch.zeros(height * scale, width * scale, 1)
            ramp = _ramp(row, part.shape[3], height, scale)[:, None] * _ramp(column, part.shape[4], width, scale)[None]
            place = (
                slice(row * scale, row * scale + ramp.shape[0]),
                slice(column * scale, column * scale + ramp.shape[1]),
            )
            total[:, :, place[0], place[1]] += frames * ramp[..., None]
            weight[place] += ramp[..., None]
        assert total is not None
        assert weight is not None
        yield total / weight


def _parts(latents: torch.Tensor, whole: bool) -> Sequence[torch.Tensor]:
    return (latents,) if whole else latents.split(1, dim=2)


def tile_starts(length: int) -> list[int]:
    """Tiles of TILE that cover a side; the last one ends with it and overlaps more."""
    if length <= TILE:
        return [0]
    return [*range(0, length - TILE, TILE - OVERLAP), length - TILE]


def _ramp(start: int, length: int, whole: int, scale: int) -> torch.Tensor:
    """Weight of a tile along one side: rises over its overlap with the tile before, falls over that with the next."""
    weight = torch.ones(length * scale)
    rise = (torch.arange(OVERLAP * scale) + 0.5) / (OVERLAP * scale)
    if start > 0:
        weight[: len(rise)] *= rise
    if start + length < whole:
        weight[-len(rise) :] *= rise.flip(0)
    return weight
