"""Wan 2.1 14B at its real sizes, lowered for TPU on a machine that has none."""

import pytest

from tests.lowering import assert_bounded_work, measure_lowering
from tests.parity import lower_full_size


@pytest.mark.slow  # by default: tests/families/test_full_size.py
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (848, 480)], ids=["720P", "480P"])
def test_wan_14b_lowers_for_eight_chips(width: int, height: int) -> None:
    seen = measure_lowering(lower_full_size.lower_programs, width, height, 81)
    programs = seen["programs"]
    latent = [1, 16, 21, height // 8, width // 8]
    for program in programs.values():
        assert program["platforms"] == ["tpu"]
        assert program["devices"] == 8
        assert program["megabytes"] < 5, "nothing of the size of a sequence was worked out on the host"
        assert program["sequences in one array"] <= 1, "no scores of all tokens by all tokens"

    step = programs["denoise_step"]
    assert step["kernels"] == 4, "queries, keys, self- and cross-attention: forty blocks are one scanned block"
    assert step["loops"] == 1
    assert step["all to all"] == 4
    assert step["outputs"] == [latent] * 6
    assert programs["encode_text"]["outputs"] == [[2, 512, 4096]]
    assert programs["encode_text"]["loops"] == 1
    assert programs["prepare"]["outputs"] == [[40, 2, 512, 40, 128]] * 2
    assert programs["decode_frame 0"]["outputs"][0] == [1, 1, height, width, 3]
    assert (
        programs["decode_frame 1"]["outputs"][0] == programs["decode_frame 2"]["outputs"][0] == [1, 4, height, width, 3]
    )
    caches = [programs[f"decode_frame {index}"]["outputs"][1:] for index in range(3)]
    assert caches[0] == caches[1] == caches[2], (
        "from the first frame on the cache keeps its shape: two programs for all"
    )

    assert_bounded_work(seen, operators=3_800)
