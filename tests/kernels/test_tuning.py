"""The table of tiles, and the tool that makes it."""

import gzip
import json
import re
from pathlib import Path

import pytest

from comfy_tpu.config import BlockSizes
from comfy_tpu.kernels import tuning
from comfy_tpu.planning.schedule_files import Region, parse_schedule
from tools.tune_attention.__main__ import choose_tiles, count_bundles
from tools.tune_attention.hidden_keys import describe_bodies
from tools.tune_attention.kernel_schedule import describe_kernel, read_vmem

# The splash kernel for v6e with tiles of 512, head size 128, bfloat16, by libtpu 0.0.51. Of the listing only the lines
# with the ends of regions are kept.
SAMPLE = Path(__file__).parent / "samples" / "splash-v6e-512.json.gz"
ROWS = json.loads(tuning.TABLE_FILE.read_text(encoding="utf-8"))


def test_table_says_what_made_it() -> None:
    made_by = ROWS["made_by"]
    assert made_by["command"].startswith("python -m tools.tune_attention")
    assert all(name.startswith("libtpu ") for name in made_by["compilers"])
    assert "nothing ran on a TPU" in made_by["note"]


def test_every_tile_is_possible_and_fits() -> None:
    for row in ROWS["tiles"]:
        tuning.check_blocks(BlockSizes(*row["tile"]))
        assert 0 < row["vmem_bytes"] <= tuning.vmem_limit(row["chip"]), row
        assert row["length"] in tuning.LENGTHS
        assert row["head_dim"] % tuning.LANES == 0
    assert len(tuning.tuned_tiles()) == len(ROWS["tiles"]), "no key twice"


@pytest.mark.parametrize("chip", tuning.VMEM_LIMIT)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_usual_heads_are_tuned_for_every_chip(chip: str, head_dim: int) -> None:
    for length in tuning.LENGTHS:
        row = next(row for row in ROWS["tiles"] if (row["chip"], row["length"]) == (chip, length))
        tokens = min(length, 118_800)
        tile = tuning.block_sizes(chip, tokens, tokens, head_dim, None)
        assert tile.query <= row["tile"][0]
        assert tile.key <= row["tile"][1]


def test_a_callers_tile_goes_before_the_table() -> None:
    assert tuning.block_sizes("v6e", 8192, 8192, 128, BlockSizes(256, 512, 128)) == BlockSizes(256, 512, 128)


@pytest.mark.parametrize(("length", "size"), [(2048, 2048), (4099, 1408), (33_390, 1792), (75_600, 2048), (5, 128)])
def test_equal_tiles_that_pad_little(length: int, size: int) -> None:
    assert tuning.block_sizes("cpu", length, 2048, 128, None).query == size


def test_a_half_empty_matrix_unit_costs_as_much_as_some_padding() -> None:
    assert tuning.block_sizes("v6e", 112_856, 2048, 128, None).query == 1792
    assert tuning.block_sizes("v5e", 112_856, 2048, 128, None).query == 1920
    assert tuning.block_sizes("v6e", 4099, 2048, 128, None).query == 1408, "less padding than 1536"


@pytest.mark.parametrize(
    ("chip", "keys", "expected"),
    [
        ("v6e", 33_390, (1792, 1024)),  # and 768: whole matrix units
        ("v7x", 33_390, (1792, 512)),
        ("v5e", 33_390, (1792, 896)),
        ("v6e", 2048, (2048, 1024)),
        ("v6e", 100, (256, 256)),
    ],
)
def test_keys_are_taken_in_steps_of_whole_matrix_units(chip: str, keys: int, expected: tuple[int, int]) -> None:
    tile = tuning.block_sizes(chip, 4096, keys, 128, None)
    assert (tile.key, tile.key_compute) == expected


def complete_listing(kept: str) -> str:
    """The kept lines, and empty bundles between them."""
    lines, bundles = [], 0
    for line in kept.splitlines():
        if match := re.match(r"\s*0x([0-9a-f]+)\s", line):
            lines += [f"0x{number:x} : {{}}" for number in range(bundles, int(match[1], 16))]
            bundles = int(match[1], 16) + 1
        lines.append(line)
    lines += [f"0x{number:x} : {{}}" for number in range(bundles, bundles + 2)]  # after the last region
    return "\n".join(lines)


def test_parts_of_a_recorded_schedule() -> None:
    sample = json.loads(gzip.decompress(SAMPLE.read_bytes()))
    regions = parse_schedule("splash", complete_listing(sample["listing"]), sample["slots"]).regions
    parts = describe_kernel(regions)
    assert (parts["bounded"]["bundles"], parts["exact"]["bundles"]) == (723, 905)
    assert (parts["bounded"]["bound"], parts["bounded"]["bound_bundles"]) == ("VPOP", 336)
    assert parts["exact"]["percent"]["VSTORE:SPILL"] == 21
    assert (parts["start_bundles"], parts["finish_bundles"], parts["step_bundles"]) == (259, 125, 51)
    with pytest.raises(ValueError, match="expected two forms"):
        describe_kernel(regions[:1])


def test_the_tile_with_the_fewest_bundles_is_chosen() -> None:
    common = {"chip": "v6e", "head_dim": 128, "start_bundles": 100, "finish_bundles": 100, "step_bundles": 50}
    default = {**common, "tile": [2048, 2048, 1024], "bounded": {"bundles": 6000}, "vmem_bytes": 1}
    small = {**common, "tile": [1024, 1024, 512], "bounded": {"bundles": 1200}, "vmem_bytes": 1}
    large = {**common, "tile": [4096, 2048, 512], "bounded": {"bundles": 9000}, "vmem_bytes": 1 << 30}
    refused = {"chip": "v6e", "head_dim": 128, "tile": [8192, 8192, 1024], "error": "exceeded VMEM"}
    assert count_bundles(default, "v6e", 128, 4096) == 2 * (200 + 2 * 6050)
    chosen = choose_tiles([default, small, large, refused])
    assert [row["tile"] for row in chosen] == [[1024, 1024, 512]] * len(tuning.LENGTHS)
    close = {**small, "bounded": {"bundles": 1470}}
    assert [row["tile"] for row in choose_tiles([default, close])][-1] == [2048, 2048, 1024], "no gain over noise"


@pytest.mark.parametrize(("offset", "used"), [(0, 13_787_136), (67_108_864, 80_900_096)])
def test_vmem_of_a_kernel_without_what_lies_before_it(offset: int, used: int) -> None:
    line = (
        '%splash = bf16[1,65536,512] custom-call(), backend_config={"flag_configs":[],"scoped_memory_configs":'
        f'[{{"memory_space":"1","offset":"{offset}","size":"67108864"}}],"used_scoped_memory_configs":'
        f'[{{"memory_space":"1","offset":"0","size":"{used}"}}]}}'
    )
    assert read_vmem(line) == used - offset
    assert read_vmem("%splash = bf16[1,65536,512] custom-call()") == 0


def make_region(number: int, **used: int) -> Region:
    slots = {"MATMUL": 0, "EUP": 0, "VALU": 0, **used}
    return Region(number, 1000 * number, 1000 * number + 100 + number, 0.0, slots, dict.fromkeys(slots, 1))


def test_bodies_of_a_kernel_that_hides_keys() -> None:
    bodies = [
        make_region(1, MATMUL=90, EUP=64, VALU=300),
        make_region(2, MATMUL=91, EUP=66, VALU=400),
        make_region(3, MATMUL=92, EUP=64, VALU=200),
        make_region(4, MATMUL=92, EUP=66, VALU=310),
    ]
    others = [make_region(5, MATMUL=9, EUP=2), make_region(0, VALU=1000)]
    found = describe_bodies([*bodies, *others])
    assert found == {"bounded": 104, "bounded, cut": 102, "exact": 105, "exact, cut": 103}
    with pytest.raises(ValueError, match="expected two forms for whole and cut tiles, got 2 bodies"):
        describe_bodies(bodies[:2])
