"""Tiles of the splash kernel by chip, length and head size."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from comfy_tpu.config import BlockSizes
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.json_input import read_json

LANES = 128
"""Width of a TPU vector register: every tile side is a multiple of it."""

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class TuningKey:
    chip: str
    length: int
    """Bucket: the smallest of LENGTHS that holds the longer of the two sequences."""
    head_dim: int
    """Rounded up to whole lanes."""


LENGTHS = (4096, 16384, 65536, 1 << 62)

DEFAULT = BlockSizes(query=2048, key=2048, key_compute=1024)
"""The seed's tile. VMEM by the TPU compiler (jax 0.10.2, v6e, L=75,600, 10 heads of 128, bf16, full attention):

    2048/2048/1024    11.88 MiB    scores of 1024×2048 in float32 are 8 of them
    2048/4096/1024    13.88 MiB    two more for the longer k and v tiles, and nothing gained but fewer grid steps
    2048/2048/2048    19.94 MiB    over the 16 MiB that a kernel gets by default on older chips
"""

_WIDE_HEADS = BlockSizes(query=1024, key=1024, key_compute=512)
"""Head sizes over 128 (the Wan VAE has one head of 384): operand tiles grow with the head, 24 MiB at 384 in float32
with the default tile."""

_WIDEST_HEADS = BlockSizes(query=1024, key=512, key_compute=512)
"""Head sizes over 512 (the HunyuanVideo-1.5 VAE has one head of 1024): by hand 18 MiB at 1024 in bfloat16."""

VMEM_LIMIT = {"v5e": 64 * MIB, "v5p": 48 * MIB, "v6e": 64 * MIB, "v7x": 48 * MIB}
"""What a kernel may take of a core's vector memory (128, 64, 128 and 64 MiB): room for float32, wide heads and tiles
that a user tries, beyond the compiler's default of 16 or 32 MiB. The rest is left to what XLA keeps there."""
VMEM_LIMIT_UNKNOWN_CHIP = 32 * MIB

MATRIX_SIDE = {"v5e": 128, "v5p": 128, "v6e": 256, "v7x": 256}
"""Rows and columns of a chip's matrix units. Keys are multiplied in steps of whole units: v6e takes 6,568 bundles for
2048×2048 scores in tiles of 1792×1792 with steps of 1024 and 768 keys, 6,793 with two of 896 (libtpu 0.0.51). Queries
are where that pads a length little: tiles of 1920 take 6,678 with the same keys."""

TABLE_FILE = Path(__file__).with_name("tiles.json")
"""The tuned table; it says what made it. `python -m tools.tune_attention` writes it."""


@functools.cache
def tuned_tiles() -> Mapping[TuningKey, BlockSizes]:
    """The tiles of TABLE_FILE."""
    rows = read_json(TABLE_FILE)["tiles"]
    return {TuningKey(row["chip"], row["length"], row["head_dim"]): BlockSizes(*row["tile"]) for row in rows}


def untuned_tile(head_dim: int) -> BlockSizes:
    """The tile where the table has none."""
    return DEFAULT if head_dim <= LANES else _WIDE_HEADS if head_dim <= 512 else _WIDEST_HEADS


def vmem_limit(chip: str) -> int:
    return VMEM_LIMIT.get(chip, VMEM_LIMIT_UNKNOWN_CHIP)


def block_sizes(chip: str, queries: int, keys: int, head_dim: int, chosen: BlockSizes | None) -> BlockSizes:
    """The tile for one call: the caller's or the table's, made to fit the lengths."""
    if chosen is None:
        longest = max(queries, keys)
        length = next(bucket for bucket in LENGTHS if longest <= bucket)
        head_dim = _round_up(head_dim, LANES)
        chosen = tuned_tiles().get(TuningKey(chip, length, head_dim)) or untuned_tile(head_dim)
    else:
        check_blocks(chosen)
    side = MATRIX_SIDE.get(chip, LANES)
    query = _fit(chosen.query, queries, LANES, side)
    key = _fit(chosen.key, keys, _common(chosen.key, 2 * LANES), side)
    step = -(-key // (chosen.key // chosen.key_compute))
    step = _round_up(step, _common(chosen.key_compute, side))
    return BlockSizes(query=query, key=key, key_compute=min(key, step))


def check_blocks(chosen: BlockSizes) -> None:
    """Raises InvalidValueError for a tile that the splash kernel cannot use."""
    sides = (chosen.query, chosen.key, chosen.key_compute)
    if any(side <= 0 or side % LANES for side in sides) or chosen.key % chosen.key_compute:
        raise InvalidValueError(
            f"attention_blocks={chosen} is not a possible tile; query, key and key_compute must be multiples of "
            f"{LANES} and key a multiple of key_compute; choose for example {DEFAULT}",
            field="attention_blocks",
        )


def _common(block: int, multiple: int) -> int:
    """What sizes are multiples of: `multiple`, or whole lanes where the tile that they come from is none of it."""
    return LANES if block % multiple else multiple


def _fit(block: int, length: int, multiple: int, side: int) -> int:
    """The size of equal tiles, of at most `block` rounded up, that cover the length at the least cost.

    A tile costs as much as 128 rows beside its own, for what the schedule cannot overlap at its ends: 4,099 tokens take
    3 tiles of 1408, not 3 of 2048, and 33,390 take 19 of 1792 rather than 17 of 2048, which are 768 more. A matrix unit
    that is half empty costs 64 rows: 112,856 take 63 of 1792 rather than 59 of 1920.
    """
    fewest = -(-length // block)
    counts = range(fewest, fewest + min(fewest // 2, 16) + 1)
    sizes = {count: _round_up(-(-length // count), multiple) for count in counts}
    ends = {count: LANES + LANES // 2 * (sizes[count] % side != 0) for count in counts}
    return sizes[min(counts, key=lambda count: count * (sizes[count] + ends[count]))]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
