"""Programs as XLA prints them, in all the forms that were met."""

import re
from pathlib import Path

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.planning.hlo import Module

PROGRAM = Path(__file__).with_name("printed_program.hlo").read_text(encoding="utf-8")


def found():
    return {item.operation.rpartition("/")[2]: item for item in Module(PROGRAM).collectives()}


def test_every_collective_as_often_as_it_runs():
    times = {name: (item.kind, item.times, item.in_loop) for name, item in found().items()}
    assert times == {
        "ppermute": ("collective-permute", 120, True),
        "weights": ("all-gather", 40, True),
        "beside": ("all-gather", 40, True),
        "sparse_core": ("all-gather", 40, True),
        "heads": ("all-to-all", 40, True),
        "norm": ("all-reduce", 40, True),
        "exchange": ("all-to-all", 1, False),
        "end": ("all-gather", 1, False),
    }


def test_operations_of_a_convolution():
    text = """HloModule m

ENTRY %main (x: bf16[1,96,6,34,20], k: bf16[32,96,3,3,3]) -> bf16[1,32,4,32,20] {
  %x = bf16[1,96,6,34,20]{4,3,2,1,0} parameter(0)
  %k = bf16[32,96,3,3,3]{4,3,2,1,0} parameter(1)
  ROOT %c = bf16[1,32,4,32,20]{4,3,2,1,0} convolution(%x, %k), window={size=3x3x3}, dim_labels=bf012_oi012->bf012
}
"""
    assert Module(text).convolution_flops() == 2 * (96 * 27) * (32 * 4 * 32 * 20)
    with pytest.raises(UnsupportedError, match="the convolution c is printed in a form that is not known"):
        Module(text.replace("dim_labels", "labels")).convolution_flops()


def test_a_collective_that_runs_beside_other_work_is_counted_once():
    assert PROGRAM.count('chain_id="0"') == 2
    assert [item.operation for item in Module(PROGRAM).collectives()].count("beside") == 1


def test_bytes():
    assert {name: item.nbytes for name, item in found().items()} == {
        "ppermute": 8 * 16 * 2,
        "weights": 8 * 16 * 2,
        "beside": 8 * 16 * 2,
        "sparse_core": 8 * 16 * 2,
        "heads": 8 * 16 * 2,
        "norm": 2 * 8 * 4,
        "exchange": 8 * 16 * 2,
        "end": 8 * 16 * 4,
    }


def test_groups_lie_along_mesh_axes():
    sizes = MeshSizes(dp=2, sp=4)
    assert {name: item.axes(sizes) for name, item in found().items()} == {
        "ppermute": ("sp",),
        "weights": ("sp",),
        "beside": ("sp",),
        "sparse_core": ("sp",),
        "heads": ("sp",),
        "norm": ("dp",),
        "exchange": ("sp",),
        "end": ("sp",),
    }
    assert found()["weights"].axes(MeshSizes(dp=2, sp=2, tp=2)) == ("sp", "tp")


def test_work():
    module = Module(PROGRAM)
    assert module.product_flops() == 40 * 2 * 8 * 4 * 16
    assert module.kernel_flops() == 40 * 1000
    assert module.kernels() == 1


def test_a_loop_may_count_with_unsigned_numbers():
    assert "s32[] constant(40)" in PROGRAM
    counted = Module(PROGRAM.replace("s32[] constant(40)", "u32[] constant(40)")).collectives()
    assert [item.times for item in counted] == [item.times for item in Module(PROGRAM).collectives()]


def test_elements_of_tuples_may_be_named_where_they_are_used():
    text = PROGRAM
    for line, name, source, index in re.findall(
        r"(  %([\w.]+) = \S+ get-tuple-element\(%([\w.]+)\), index=(\d+)\n)", text
    ):
        text = re.sub(rf"%{re.escape(name)}(?![\w.#])", f"%{source}#{index}", text.replace(line, ""))
    assert "get-tuple-element" not in text
    assert "#0" in text
    shortened, module = Module(text), Module(PROGRAM)
    assert shortened.collectives() == module.collectives()
    assert shortened.product_flops() == module.product_flops()
    with pytest.raises(UnsupportedError, match=r"names %p#7, which is not in inner_condition"):
        Module(text.replace("%p#0", "%p#7"))


def test_a_known_trip_count_goes_first():
    told = PROGRAM.replace("body=%outer_body", 'body=%outer_body, backend_config={"known_trip_count":{"n":"7"}}')
    assert {item.times for item in Module(told).collectives()} == {1, 7, 21}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("constant(40)", "parameter(0)", "the loop outer does not say how often it runs"),
        ("[2,4]<=[8]", "all", "names the devices of a collective in a form that is not known"),
        ("ENTRY %main", "%main", "has no entry computation"),
    ],
)
def test_what_is_not_understood_is_not_counted_as_nothing(before, after, message):
    assert before in PROGRAM
    with pytest.raises(UnsupportedError, match=message):
        Module(PROGRAM.replace(before, after)).collectives()
