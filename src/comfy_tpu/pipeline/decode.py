"""Decodes latents to frames, one latent frame at a time or all together; in tiles where a whole frame does not fit."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from jax.profiler import TraceAnnotation

from comfy_tpu.bridge import to_host
from comfy_tpu.errors import DeviceMemoryError
from comfy_tpu.families.model_family import Tiles

logger = logging.getLogger(__name__)

DecodeFrame = Callable[[torch.Tensor, object], tuple[object, object]]
"""(latent frames, cache or None) -> (frames, cache), arrays still on the devices."""


def _no_cache(frames: int) -> object:
    return None


def count_parts(frames: int, *, all_frames: bool, tiles: Tiles) -> int:
    """The number of parts in which latents of this many frames are decoded."""
    return len(_frame_starts(frames, tiles)) if all_frames else frames


def decode_frames(
    decode_frame: DecodeFrame,
    latents: torch.Tensor,
    first_cache: Callable[[int], object] = _no_cache,
    *,
    all_frames: bool = False,
    tiles: Tiles,
) -> Iterator[torch.Tensor]:
    """Yields [batch, t, height, width, 3] in 0..1 for each latent frame of [batch, channels, frames, height, width], or
    for all of them at once if `all_frames`; of a long video, for `tiles.frames` at a time.

    If the first two latent frames do not fit in device memory, every frame is decoded in tiles instead: the cache has
    its full size after two. From the third on, a frame's program is started before the frames before it are yielded.
    """
    if all_frames and len(_frame_starts(latents.shape[2], tiles)) > 1:
        yield from _decode_frame_tiles(decode_frame, latents, tiles)
        return
    ahead: list[torch.Tensor] = []
    begun = False
    try:
        cache = first_cache(latents.shape[2])
        for index, latent in enumerate(_parts(latents, all_frames)):
            with TraceAnnotation("decode latent frame", number=index + 1):
                frames, cache = decode_frame(latent, cache)
            if index >= 2:
                begun = True
                yield from ahead  # The caller writes them while the devices decode: 0.34 s of the demo, not 0.37.
                ahead.clear()
            with TraceAnnotation("wait for latent frame", number=index + 1):
                ahead.append(to_host(frames, consume=True))
        yield from ahead
    except DeviceMemoryError as error:
        if max(latents.shape[3:]) <= tiles.side or begun:
            raise
        logger.warning("decoding whole frames did not fit in device memory; decoding in tiles instead (%s)", error)
        del cache
        yield from decode_tiles(decode_frame, latents, first_cache, all_frames=all_frames, tiles=tiles)


def _decode_frame_tiles(decode_frame: DecodeFrame, latents: torch.Tensor, tiles: Tiles) -> Iterator[torch.Tensor]:
    """Decodes overlapping tiles of one length, and so by one program; neighbours are blended over their common frames.

    As diffusers does for this VAE, but for the first frame of a later tile: a decoder makes one frame of the first
    latent of whatever it gets. That frame is left out here. diffusers 0.42 leaves out the last one instead, and so
    shows every later tile one frame late (in its HunyuanVideo VAE it leaves out the first).
    """
    starts = _frame_starts(latents.shape[2], tiles)
    kept = torch.empty(0)
    for start, following in zip(starts, (*starts[1:], None), strict=True):
        part = latents[:, :, start : start + tiles.frames]
        (frames,) = decode_frames(decode_frame, part, all_frames=True, tiles=dataclasses.replace(tiles, frames=0))
        scale = (frames.shape[1] - 1) // (part.shape[2] - 1)
        if start:
            frames = frames[:, 1:]
            share = (torch.arange(kept.shape[1]) / kept.shape[1]).view(1, -1, 1, 1, 1)
            frames[:, : kept.shape[1]] = kept * (1 - share) + frames[:, : kept.shape[1]] * share
        shown = frames.shape[1] if following is None else (following - start) * scale + (0 if start else 1)
        kept = frames[:, shown:].clone()
        yield frames[:, :shown]


def _frame_starts(frames: int, tiles: Tiles) -> list[int]:
    if not tiles.frames or frames <= tiles.frames:
        return [0]
    return tile_starts(frames, Tiles(side=tiles.frames, overlap=tiles.frame_overlap + 1))


def decode_tiles(
    decode_frame: DecodeFrame,
    latents: torch.Tensor,
    first_cache: Callable[[int], object] = _no_cache,
    *,
    all_frames: bool = False,
    tiles: Tiles,
) -> Iterator[torch.Tensor]:
    """`decode_frames` in overlapping tiles of one size, and so one program; neighbours are blended over their
    overlap."""
    height, width = latents.shape[3:]
    corners = list(itertools.product(tile_starts(height, tiles), tile_starts(width, tiles)))
    caches = {corner: first_cache(latents.shape[2]) for corner in corners}
    for latent in _parts(latents, all_frames):
        total: torch.Tensor | None = None
        weight: torch.Tensor | None = None
        for row, column in corners:
            part = latent[..., row : row + tiles.side, column : column + tiles.side]
            with TraceAnnotation("decode tile", row=row, column=column):
                array, caches[row, column] = decode_frame(part, caches[row, column])
                frames = to_host(array, consume=True)
            scale = frames.shape[2] // part.shape[3]
            if total is None or weight is None:
                total = torch.zeros(*frames.shape[:2], height * scale, width * scale, 3)
                weight = torch.zeros(height * scale, width * scale, 1)
            down = _ramp(row, part.shape[3], height, tiles.overlap, scale)
            ramp = down[:, None] * _ramp(column, part.shape[4], width, tiles.overlap, scale)[None]
            place = (
                slice(row * scale, row * scale + ramp.shape[0]),
                slice(column * scale, column * scale + ramp.shape[1]),
            )
            total[:, :, place[0], place[1]] += frames * ramp[..., None]
            weight[place] += ramp[..., None]
        assert total is not None
        assert weight is not None
        yield total / weight


def _parts(latents: torch.Tensor, all_frames: bool) -> Sequence[torch.Tensor]:
    return (latents,) if all_frames else latents.split(1, dim=2)


def tile_starts(length: int, tiles: Tiles) -> list[int]:
    """The first positions of tiles that cover a side; the last tile ends with the side and overlaps more."""
    if length <= tiles.side:
        return [0]
    return [*range(0, length - tiles.side, tiles.side - tiles.overlap), length - tiles.side]


def _ramp(start: int, length: int, whole: int, overlap: int, scale: int) -> torch.Tensor:
    """Weights of a tile along one side: rising over the overlap with the tile before, falling over that with the
    next."""
    weight = torch.ones(length * scale)
    rise = (torch.arange(overlap * scale) + 0.5) / (overlap * scale)
    if start > 0:
        weight[: len(rise)] *= rise
    if start + length < whole:
        weight[-len(rise) :] *= rise.flip(0)
    return weight
