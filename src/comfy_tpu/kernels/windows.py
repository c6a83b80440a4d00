"""Attention windows over the tokens of a video: their text form, and which tiles attend to which."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable

import numpy as np

from comfy_tpu.config import ATTENTION_WINDOWS, BlockSizes, TileWindow, TokenWindow
from comfy_tpu.errors import InvalidValueError

Grid = tuple[int, int, int]
"""Frames, rows and columns of tokens."""

_SIDES = r"(\d{1,6})x(\d{1,6})x(\d{1,6})"
_AXES = ("frames", "rows", "columns")


def parse_window(text: str) -> TokenWindow | TileWindow | None:
    """The window of "full", "video", "2048,2048" (tokens before and after) or "4x16x16:3x3x3" (tile and tiles)."""
    given = text.strip().lower()
    if given in ATTENTION_WINDOWS:
        return ATTENTION_WINDOWS[given]
    if match := re.fullmatch(r"(\d{1,9})\s*,\s*(\d{1,9})", given):
        return TokenWindow(int(match[1]), int(match[2]))
    match = re.fullmatch(f"{_SIDES}:{_SIDES}", given.replace("×", "x"))
    sides = [] if match is None else [int(side) for side in match.groups()]
    if not sides or 0 in sides:
        raise InvalidValueError(
            f"attention_window={text!r} is no window; write full, video, tokens before and after as 2048,2048, or "
            "frames×rows×columns of a tile and of the window in tiles as 4x16x16:3x3x3",
            field="attention_window",
        )
    return TileWindow((sides[0], sides[1], sides[2]), (sides[3], sides[4], sides[5]))


def parse_blocks(text: str) -> BlockSizes | None:
    """The block sizes of "auto" (None) or "2048,2048,1024": query rows, key rows, key rows computed at a time."""
    given = text.strip().lower()
    if given == "auto":
        return None
    match = re.fullmatch(r"(\d{1,6})\s*,\s*(\d{1,6})\s*,\s*(\d{1,6})", given)
    if match is None:
        raise InvalidValueError(
            f"attention_blocks={text!r} are no block sizes; write auto, or rows of queries, of keys, and of keys "
            "computed at a time as 2048,2048,1024",
            field="attention_blocks",
        )
    return BlockSizes(*map(int, match.groups()))


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Which tiles of a token grid attend to which. Tiles and the tokens in them are in the order of the grid."""

    grid: Grid
    tile: Grid
    tiles: Grid
    """The size of the window in tiles, at most the number of tiles."""

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def counts(self) -> Grid:
        """Tiles along each axis."""
        return _for_axes(lambda axis: -(-self.grid[axis] // self.tile[axis]))

    @property
    def largest(self) -> Grid:
        """The sides of the largest tile."""
        return _for_axes(lambda axis: -(-self.grid[axis] // self.counts[axis]))

    @property
    def is_even(self) -> bool:
        """Whether all tiles have the same size."""
        return all(side % count == 0 for side, count in zip(self.grid, self.counts, strict=True))

    @property
    def attended_share(self) -> float:
        """The share of the key tiles that a query attends to."""
        return math.prod(self.tiles) / math.prod(self.counts)

    def rows(self, multiple: int = 1) -> int:
        """Rows of a padded tile."""
        return -(-math.prod(self.largest) // multiple) * multiple

    @functools.cached_property
    def token_lists(self) -> list[np.ndarray]:
        """The tokens of each tile, in increasing order."""
        numbers = np.arange(self.tokens).reshape(self.grid)
        bounds = [
            [side * i // count for i in range(count + 1)] for side, count in zip(self.grid, self.counts, strict=True)
        ]
        slices = ([slice(*pair) for pair in itertools.pairwise(axis)] for axis in bounds)
        return [numbers[place].reshape(-1) for place in itertools.product(*slices)]

    @property
    def sizes(self) -> np.ndarray:
        """The number of tokens of each tile."""
        return np.array([len(tokens) for tokens in self.token_lists], np.int32)

    def padded_tokens(self, multiple: int = 1) -> np.ndarray:
        """Tokens by tile and row, [tiles, rows]; the padding after a tile's tokens is token 0."""
        rows = self.rows(multiple)
        return np.stack([np.pad(tokens, (0, rows - len(tokens))) for tokens in self.token_lists])

    def positions(self, multiple: int = 1) -> np.ndarray:
        """The padded row of each token."""
        rows = self.rows(multiple)
        found = np.empty(self.tokens, np.int32)
        for number, tokens in enumerate(self.token_lists):
            found[tokens] = number * rows + np.arange(len(tokens))
        return found

    @functools.cached_property
    def neighbours(self) -> np.ndarray:
        """The tiles that each tile attends to, [tiles, window]. At a border the window moves inwards."""
        ranges = [
            [range(first, first + seen) for i in range(count) for first in [min(max(i - seen // 2, 0), count - seen)]]
            for count, seen in zip(self.counts, self.tiles, strict=True)
        ]
        windows = (itertools.product(*axes) for axes in itertools.product(*ranges))
        return np.array([[np.ravel_multi_index(place, self.counts) for place in each] for each in windows], np.int32)


@functools.lru_cache(maxsize=64)
def make_schedule(window: TileWindow, grid: Grid) -> TileSchedule:
    """The schedule of a window over a grid; raises InvalidValueError for a tile that is larger than the grid."""
    for axis, (side, tokens) in enumerate(zip(window.tile, grid, strict=True)):
        if side > tokens and not window.is_clipped:
            raise InvalidValueError(
                f"attention_window={window}: a tile of {side} {_AXES[axis]} does not fit into the video's {tokens} "
                f"(its tokens are {'×'.join(map(str, grid))}); choose at most {tokens}",
                field="attention_window",
            )
    tile = _for_axes(lambda axis: min(window.tile[axis], grid[axis]))
    counts = _for_axes(lambda axis: -(-grid[axis] // tile[axis]))
    return TileSchedule(grid, tile, _for_axes(lambda axis: min(window.tiles[axis], counts[axis])))


def _for_axes(function: Callable[[int], int]) -> Grid:
    return function(0), function(1), function(2)
