"""Searches the tiles of the splash kernel: `python -m tools.tune_attention`.

Each tile is compiled for each chip by libtpu, with no TPU (`kernel_schedule`). Measurements are kept in a file and not
repeated; the tile with the fewest bundles over the lengths of each bucket goes into the table that
`comfy_tpu.kernels.tuning` reads. Needs libtpu: `pip install libtpu`. Half a minute a tile and chip on two cores.

    python -m tools.tune_attention --chips v6e --head-dims 128 --tiles 2048,2048,1024 --again    # repeats one figure
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from comfy_tpu.config import BlockSizes
from comfy_tpu.kernels import tuning
from tools.tune_attention.kernel_schedule import TOPOLOGIES, measure

logger = logging.getLogger(__name__)

MEASUREMENTS = Path("benchmarks/schedule/attention.json")
TILES = (
    "2048,2048,1024",
    "2048,2048,512",
    "1024,2048,1024",
    "4096,2048,512",
)
WIDE_TILES = ("1024,1024,512", "2048,1024,512", "1024,2048,512")
NARROW = 128
"""Heads up to whole lanes once: 64 is padded to 128."""

SAMPLE_LENGTHS = {
    4096: (2048, 4096),
    16384: (8192, 9450, 16384),
    65536: (32_760, 33_390, 53_550),
    1 << 62: (75_600, 118_800),
}
"""Lengths of each bucket for which tiles are compared: videos and images of the families."""

MARGIN = 0.02
"""A tile replaces the default where it saves more than this: less is noise of the compiler's scheduler."""
LARGEST_SIDE = 2048
"""Larger tiles are measured and not chosen: the layouts count with lengths padded to at most this
(parallel/layouts.py). 4096×2048 saves 1.4 % of a tile's bundles on v6e."""


def count_bundles(found: dict[str, Any], chip: str, head_dim: int, length: int) -> float:
    """Bundles of one head's attention among `length` tokens, by a tile's measurement, in the bounded form."""
    tile = BlockSizes(*found["tile"])
    fitted = tuning.block_sizes(chip, length, length, head_dim, tile)
    rows, columns = -(-length // fitted.query), -(-length // fitted.key)
    shrunk = fitted.query * fitted.key / (tile.query * tile.key)
    step = found["step_bundles"] + shrunk * found["bounded"]["bundles"]
    return rows * (found["start_bundles"] + found["finish_bundles"] + columns * step)


def choose_tiles(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best tile for each chip, bucket and head size that was measured."""
    rows = []
    for chip, head_dim in sorted({(found["chip"], found["head_dim"]) for found in measurements}):
        fitting = [
            found
            for found in measurements
            if (found["chip"], found["head_dim"]) == (chip, head_dim)
            and "error" not in found
            and found["vmem_bytes"] <= tuning.vmem_limit(chip)
            and max(found["tile"]) <= LARGEST_SIDE
        ]
        for bucket, lengths in SAMPLE_LENGTHS.items():
            ranked = []
            for found in fitting:
                total = sum(count_bundles(found, chip, head_dim, length) / length**2 for length in lengths)
                is_default = BlockSizes(*found["tile"]) == tuning.untuned_tile(head_dim)
                ranked.append((total * (1 - MARGIN if is_default else 1), total, found["tile"], found))
            if ranked:
                _, total, tile, found = min(ranked, key=lambda entry: entry[:3])
                rows.append(
                    {
                        "chip": chip,
                        "length": bucket,
                        "head_dim": head_dim,
                        "tile": tile,
                        "bundles": round(total / len(lengths) * 2048**2),
                        "vmem_bytes": found["vmem_bytes"],
                    }
                )
    return rows


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chips", default=",".join(TOPOLOGIES))
    parser.add_argument("--head-dims", default="128")
    parser.add_argument("--tiles", nargs="*", help="query,key,key_compute; several are possible")
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    parser.add_argument("--table", type=Path, default=tuning.TABLE_FILE)
    parser.add_argument("--again", action="store_true", help="measure also what the file already holds")
    given = parser.parse_args()

    kept = json.loads(given.measurements.read_text(encoding="utf-8")) if given.measurements.exists() else {}
    measurements = {_key(found): found for found in kept.get("measurements", [])}
    for chip in given.chips.split(","):
        for head_dim in (int(word) for word in given.head_dims.split(",")):
            for text in given.tiles or (TILES if head_dim <= NARROW else WIDE_TILES):
                tile = [int(side) for side in text.split(",")]
                key = (chip, head_dim, *tile)
                if key in measurements and not given.again:
                    continue
                found = measure(chip, head_dim, BlockSizes(*tile))
                measurements[key] = {"chip": chip, "head_dim": head_dim, "tile": tile, **found}
                logger.info("%s %s %s: %s", chip, head_dim, text, found.get("error") or found["bounded"]["bundles"])
                _write(given.measurements, {"measurements": [measurements[key] for key in sorted(measurements)]})
    versions = sorted({(found["libtpu"], found["jax"]) for found in measurements.values() if "error" not in found})
    made_by = {
        "command": shlex.join(["python", "-m", "tools.tune_attention", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "compilers": [f"libtpu {libtpu}, jax {jax}" for libtpu, jax in versions],
        "note": "bundles of the compiler's static schedule, bfloat16; nothing ran on a TPU",
        "bundles": "of 2048×2048 scores, with padding, averaged over the sample lengths of the bucket",
    }
    _write(given.table, {"made_by": made_by, "tiles": choose_tiles(list(measurements.values()))})


def _key(found: dict[str, Any]) -> tuple[Any, ...]:
    return (found["chip"], found["head_dim"], *found["tile"])


def _write(path: Path, content: dict[str, Any]) -> None:
    """A line for each item of a list: changes can be read."""
    parts = []
    for name, value in content.items():
        if isinstance(value, list):
            value = "[\n    " + ",\n    ".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n  ]"
        else:
            value = json.dumps(value, ensure_ascii=False, indent=2).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(name)}: {value}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
