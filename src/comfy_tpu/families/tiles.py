"""Tiles: parts of a large image or video that a model looks at one after the other, and how their results are blended.

Positions are latents.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Limits, ModelCard

_TILE = re.compile(r"\s*([1-9][0-9]{0,4})[xX×]([1-9][0-9]{0,4})\s*")
OVERLAP_MAX = 0.75


@dataclasses.dataclass(frozen=True)
class Spans:
    """Parts of equal length that cover a line, one behind the other."""

    starts: tuple[int, ...]
    length: int
    """Of a part."""

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """The positions of each part."""
        return (tuple(range(start, start + self.length)) for start in self.starts)

    @functools.cached_property
    def shares(self) -> list[tuple[float, ...]]:
        """The weight of each position of each part, by ramps over what two parts have in common; those of a position
        of the line add up to 1."""
        weights = [self._weights(number) for number in range(len(self.starts))]
        totals = [0.0] * (self.starts[-1] + self.length)
        for start, own in zip(self.starts, weights, strict=True):
            for place, weight in enumerate(own, start):
                totals[place] += weight
        return [
            tuple(weight / totals[place] for place, weight in enumerate(own, start))
            for start, own in zip(self.starts, weights, strict=True)
        ]

    def _weights(self, number: int) -> list[float]:
        weights = [1.0] * self.length
        if number > 0:
            common = self.starts[number - 1] + self.length - self.starts[number]
            for place in range(common):
                weights[place] *= (place + 0.5) / common
        if number + 1 < len(self.starts):
            common = self.starts[number] + self.length - self.starts[number + 1]
            for place in range(common):
                weights[-1 - place] *= (place + 0.5) / common
        return weights


@dataclasses.dataclass(frozen=True)
class Tiles:
    rows: Spans
    columns: Spans

    def __len__(self) -> int:
        return len(self.rows.starts) * len(self.columns.starts)

    def places(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The rows and the columns of each tile."""
        return list(itertools.product(self.rows, self.columns))

    def shares(self) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """The weights of the rows and of the columns of each tile; the products add up to 1 at each latent."""
        return list(itertools.product(self.rows.shares, self.columns.shares))


def find_tiles(card: ModelCard, settings: GenerationSettings) -> Tiles | None:
    """None where the result is no larger than a tile."""
    own = tile_settings(settings)
    if (own.height, own.width) == (settings.height, settings.width):
        return None
    (_, height, width), (_, tile_height, tile_width) = card.latent_size(settings), card.latent_size(own)
    overlap = settings.tile_overlap
    return Tiles(_cover(height, tile_height, overlap), _cover(width, tile_width, overlap))


def tile_settings(settings: GenerationSettings) -> GenerationSettings:
    """The settings of one tile as a result of its own."""
    width, height = parse_tile(settings.tile) if settings.tile else (settings.width, settings.height)
    return dataclasses.replace(
        settings,
        width=min(width, settings.width),
        height=min(height, settings.height),
        tile="",
        tile_overlap=GenerationSettings.tile_overlap,
    )


def parse_tile(text: str) -> tuple[int, int]:
    """Width and height from "832x480"."""
    match = _TILE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidValueError(
            f"tile={str(text)[:40]!r} is no size of tiles; write width×height, such as 832x480", field="tile"
        )
    return int(match[1]), int(match[2])


def check_tile(settings: GenerationSettings, limits: Limits) -> None:
    """Raises InvalidValueError for tiles that no model with these limits can look at."""
    overlap = settings.tile_overlap
    is_number = isinstance(overlap, (int, float)) and not isinstance(overlap, bool)
    if not is_number or not 0 <= overlap <= OVERLAP_MAX:
        raise InvalidValueError(
            f"tile_overlap={overlap!r} is not a number from 0 to {OVERLAP_MAX:g}", field="tile_overlap"
        )
    if settings.tile == "":
        return
    step = limits.size_multiple
    for side in parse_tile(settings.tile):
        if side % step:
            raise InvalidValueError(
                f"tile={settings.tile} has a side of {side}, which is not divisible by {step}; use "
                f"{max(side // step, 1) * step}",
                field="tile",
            )


@functools.lru_cache(maxsize=256)
def _cover(whole: int, part: int, overlap: float) -> Spans:
    """Parts at distances as equal as they can be, which have `overlap` of their length in common at least, and one
    latent."""
    if part >= whole:
        return Spans((0,), whole)
    step = max(1, part - max(1, round(overlap * part)))
    count = 1 + math.ceil((whole - part) / step)
    return Spans(tuple(round(number * (whole - part) / (count - 1)) for number in range(count)), part)
