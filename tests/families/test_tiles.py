"""Where tiles lie and what they weigh; and which settings of tiles are refused."""

import itertools
import re

import pytest

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.context import call_settings, choose_method, find_windows, window_counts
from comfy_tpu.families.registry import model_cards
from comfy_tpu.families.settings import make_settings
from comfy_tpu.families.tiles import find_tiles, tile_settings

CARDS = {card.name: card for card in model_cards()}
WAN = CARDS["Wan 2.1"]


def settings(**chosen: object) -> GenerationSettings:
    return make_settings(WAN.defaults, {"height": 960, "width": 1664, **chosen}, WAN.limits)


@pytest.mark.parametrize("tile", ["832x480", "640x640", "1648x944", "1664x480", "16x16"])
@pytest.mark.parametrize("overlap", [0, 0.1, 0.25, 0.75])
def test_tiles_cover_the_whole_and_their_weights_add_up_to_one(tile: str, overlap: float) -> None:
    tiles = find_tiles(WAN, settings(tile=tile, tile_overlap=overlap))
    assert tiles is not None
    width, height = (int(side) // 8 for side in tile.split("x"))
    for spans, whole, part in ((tiles.rows, 120, height), (tiles.columns, 208, width)):
        total = [0.0] * whole
        for places, shares in zip(spans, spans.shares, strict=True):
            assert len(places) == len(shares) == part
            for place, share in zip(places, shares, strict=True):
                assert share > 0
                total[place] += share
        assert total == pytest.approx([1.0] * whole)
        for before, after in itertools.pairwise(spans.starts):
            assert 1 <= part - (after - before) < part
            if part > 2:
                assert part - (after - before) >= int(overlap * part)
    places = tiles.places()
    assert len(places) == len(tiles) == len(tiles.shares())
    assert {(row, column) for rows, columns in places for row in rows for column in columns} == set(
        itertools.product(range(120), range(208))
    )


def test_weights_rise_over_what_two_tiles_have_in_common() -> None:
    tiles = find_tiles(WAN, settings(width=1040, height=480, tile="640x480", tile_overlap=0.25))
    assert tiles is not None
    assert tiles.columns.starts == (0, 50), "of 130 latents"
    first, second = tiles.columns.shares
    assert first[:50] == second[30:] == (1.0,) * 50
    assert first[50:] == pytest.approx([1 - (place + 0.5) / 30 for place in range(30)])
    assert tiles.rows.starts == (0,)


def test_a_result_no_larger_than_a_tile_has_none() -> None:
    assert find_tiles(WAN, settings(tile="1664x960")) is None
    assert find_tiles(WAN, settings(tile="2048x2048")) is None
    assert find_tiles(WAN, settings()) is None
    wide = settings(tile="832x2048")
    assert (tile_settings(wide).width, tile_settings(wide).height) == (832, 960)


def test_tiles_are_the_calls_of_a_step_beside_windows_or_without() -> None:
    short, long = settings(tile="832x480"), settings(tile="832x480", num_frames=161)
    for made, windows, frames in ((short, 1, 81), (long, 3, 81)):
        method = choose_method(WAN, made, begins_with_image=False)
        context = find_windows(WAN, made, method)
        assert context is not None
        assert context.count() == windows * 9
        assert window_counts(WAN, made) == (1, 2, 4, 8)
        call = call_settings(WAN, made, 2)
        assert (call.width, call.height, call.num_frames, call.num_videos, call.tile) == (832, 480, frames, 2, "")
    image = CARDS["Flux.1 dev"]
    made = make_settings(image.defaults, {"height": 2048, "width": 2048, "tile": "1024x1024"}, image.limits)
    assert window_counts(image, made) == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"tile": "480P"}, "tile='480P' is no size of tiles; write width×height, such as 832x480"),
        ({"tile": "832x480x81"}, "tile='832x480x81' is no size of tiles"),
        ({"tile": "0x480"}, "tile='0x480' is no size of tiles"),
        ({"tile": 832}, "tile='832' is no size of tiles"),
        ({"tile": "x" * 10_000}, "is no size of tiles"),
        ({"tile": "840x480"}, "tile=840x480 has a side of 840, which is not divisible by 16; use 832"),
        ({"tile": "8x16"}, "tile=8x16 has a side of 8, which is not divisible by 16; use 16"),
        ({"tile_overlap": -0.1}, "tile_overlap=-0.1 is not a number from 0 to 0.75"),
        ({"tile_overlap": 0.8}, "tile_overlap=0.8 is not a number from 0 to 0.75"),
        ({"tile_overlap": float("nan")}, "tile_overlap=nan is not a number"),
        ({"tile_overlap": True}, "tile_overlap=True is not a number"),
        ({"tile_overlap": "much"}, "tile_overlap='much' is not a number"),
    ],
)
def test_refused(chosen: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(text)) as caught:
        settings(**chosen)
    assert caught.value.field in chosen
    assert len(str(caught.value)) < 300
