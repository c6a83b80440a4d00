import dataclasses

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.traffic import UNEXPLAINED
from comfy_tpu.planning.causes import explain_traffic
from comfy_tpu.planning.hlo import Collective

SIZES = MeshSizes(dp=2, sp=2, tp=2)
GROUPS = {"dp": (0, 4), "sp": (0, 2), "tp": (0, 1), "sp tp": (0, 1, 2, 3)}
TEXT_TOKENS = 512
WEIGHTS = [(2560, 5120), (5120, 16, 1, 2, 2)]


def item(kind, axes, operation, *, shape=(1, 100, 64), in_loop=True, times=40):
    return Collective(kind, "bf16", shape, 2 * 100 * 64, GROUPS[axes], times, in_loop, operation)


EXPLAINED = [
    (item("all-to-all", "sp", "attention/shard_map/all_to_all"), "sequence exchange (Ulysses)"),
    (item("collective-permute", "sp", "while/body/ppermute"), "keys and values around the ring"),
    (item("all-reduce", "tp", "while/body/linear/...a,ba->...b/dot_general"), "sum over columns (tp)"),
    (item("all-reduce", "tp", "rms_norm/reduce_sum"), "norm over columns (tp)"),
    (item("all-gather", "sp", "squeeze", shape=(1, 2560, 5120)), "weight gather"),
    (item("all-gather", "sp tp", "constraint", shape=(5120, 16, 1, 2, 2), in_loop=False, times=1), "weight gather"),
    (item("all-gather", "sp tp", "x/sharding_constraint", shape=(32, 160, 64), in_loop=False), "weight gather"),
    (item("all-gather", "sp", "jit(x_step)/sharding_constraint", in_loop=False, times=1), "text gather"),
    (item("all-gather", "sp", "jit(x_step)/while", in_loop=False, times=1), "text gather"),
    (item("all-gather", "tp", "while/body/linear/dot_general"), "text gather"),
    (item("all-gather", "tp", "while/body/aten::view/reshape"), "text gather"),
    (item("all-gather", "tp", "while/body/linear/add", shape=(1, 12288)), "modulation gather"),
    (item("all-gather", "sp", "aten::view/reshape", in_loop=False, times=1), "prediction gather"),
    (item("all-to-all", "sp", "jit(transformer_denoise_step)/reshape", in_loop=False, times=1), "patch embedding"),
    (item("all-gather", "sp", "linear/add", in_loop=False, times=1), "prediction gather"),
    (item("all-to-all", "dp", "convert.11", in_loop=False, times=1), "guidance branches"),
    (item("all-to-all", "dp", "aten::cat/concatenate", in_loop=False, times=1), "guidance branches"),
    (item("collective-permute", "dp", "aten::add.Tensor/slice", in_loop=False, times=1), "guidance branches"),
    (item("collective-permute", "dp", "jit(x_step)/convert_element_type", in_loop=False, times=1), "guidance branches"),
]


@pytest.mark.parametrize(("collective", "cause"), EXPLAINED, ids=[cause for _, cause in EXPLAINED])
def test_explained(collective, cause):
    (traffic,) = explain_traffic([collective], SIZES, WEIGHTS, TEXT_TOKENS)
    assert traffic.cause == cause
    assert traffic.count == collective.times
    assert traffic.detail == ""


RESHARDINGS = {
    "activations gathered in the loop": item("all-gather", "sp", "while/body/squeeze", shape=(1, 75600, 5120)),
    "a video's tokens gathered behind the loop": item(
        "all-gather", "sp", "jit(x_step)/while", shape=(1, 75600, 5120), in_loop=False
    ),
    "a video's tokens gathered over tp": item("all-gather", "tp", "while/body/view/reshape", shape=(1, 75600, 5120)),
    "the text of the blocks gathered over tp": item(
        "all-gather", "tp", "while/body/view/reshape", shape=(1, TEXT_TOKENS, 5120)
    ),
    "as many values as a weight, elsewhere": item("all-gather", "sp", "linear/reshape", shape=(32, 160, 64)),
    "a weight-shaped gather over dp": item("all-gather", "dp", "squeeze", shape=(1, 2560, 5120)),
    "an exchange over tp": item("all-to-all", "tp", "shard_map/all_to_all"),
    "an exchange that no attention asked for": item("all-to-all", "sp", "linear/transpose"),
    "tokens exchanged behind a view": item("all-to-all", "sp", "aten::view/reshape", in_loop=False),
    "a constraint in the loop": item("all-gather", "sp", "jit(x_step)/while/body/sharding_constraint"),
    "a sum over sp": item("all-reduce", "sp", "linear/dot_general"),
    "a permutation in the loop": item("collective-permute", "dp", "aten::add.Tensor/slice"),
    "the answer gathered over tp": item("all-gather", "tp", "aten::view/reshape", in_loop=False),
}


@pytest.mark.parametrize("name", RESHARDINGS)
def test_a_resharding_is_not_explained_away(name):
    (traffic,) = explain_traffic([RESHARDINGS[name]], SIZES, WEIGHTS, TEXT_TOKENS)
    assert traffic.cause == UNEXPLAINED
    assert RESHARDINGS[name].operation in traffic.detail


def test_the_same_is_added_up_and_the_largest_is_first():
    gather = item("all-gather", "sp", "squeeze", shape=(2560, 5120))
    small = dataclasses.replace(EXPLAINED[3][0], nbytes=4)
    traffic = explain_traffic([small, gather, gather], SIZES, WEIGHTS, TEXT_TOKENS)
    assert [(t.cause, t.count) for t in traffic] == [("weight gather", 80), ("norm over columns (tp)", 40)]
    assert traffic[0].nbytes == 80 * 2 * 100 * 64 // 2
