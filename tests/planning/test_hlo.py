"""Programs as XLA prints them, in all the forms that were met."""

import pytest

from comfy_tpu.config import MeshSizes
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.planning.hlo import Module

PROGRAM = """\
HloModule jit_step, entry_computation_layout={(bf16[8,16]{1,0})->bf16[8,16]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_condition (p: (s32[], bf16[8,16])) -> pred[] {
  %p = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %three = s32[]{:T(128)} constant(3), backend_config={"flag_configs":[]}
  ROOT %lt = pred[]{:T(512)} compare(%i, %three), direction=LT
}

%inner_body (p.1: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x.1 = bf16[8,16]{1,0} get-tuple-element(%p.1), index=1
  %permute = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x.1), channel_id=1, source_target_pairs={{0,1},{1,0}}, metadata={op_name="while/body/ppermute"}
  %done = bf16[8,16]{1,0} collective-permute-done(%permute)
  ROOT %t.1 = (s32[], bf16[8,16]{1,0}) tuple(%i.1, %done)
}

%outer_condition (p.2: (s32[], bf16[8,16])) -> pred[] {
  %p.2 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %forty = s32[] constant(40)
  ROOT %lt.2 = pred[] compare(%i.2, %forty), direction=LT
}

%outer_body (p.3: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p.3 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x.3 = bf16[8,16]{1,0} get-tuple-element(%p.3), index=1
  %w = bf16[16,4]{1,0} constant({...})
  %dot = bf16[8,4]{1,0} dot(%x.3, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gather = bf16[8,16]{1,0} all-gather(%dot), replica_groups=[2,4]<=[8], dimensions={1}, metadata={op_name="weights"}
  %reduce = (f32[8], f32[8]) all-reduce(%r, %s), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, metadata={op_name="norm"}
  %kernel = bf16[8,16]{1,0} custom-call(%gather), custom_call_target="tpu_custom_call", metadata={op_name="splash"}, backend_config={"custom_call_config": {"body": "TUw", "cost_estimate": {
"transcendentals": 5,
"flops": 1000,
"bytes_accessed": 7
}
}}
  %inner = (s32[], bf16[8,16]{1,0}) while(%init), condition=%inner_condition, body=%inner_body
  ROOT %t.3 = (s32[], bf16[8,16]{1,0}) tuple(%i.3, %kernel)
}

%asynchronous (p.4: bf16[8,16]) -> bf16[8,16] {
  %p.4 = bf16[8,16]{1,0} parameter(0)
  ROOT %exchange = bf16[8,16]{1,0} all-to-all(%p.4), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, metadata={op_name="exchange"}
}

ENTRY %main (arg: bf16[8,16]) -> bf16[8,16] {
  %arg = bf16[8,16]{1,0} parameter(0)
  %start = ((bf16[8,16]{1,0}), bf16[8,16]{1,0}, u32[]) async-start(%arg), calls=%asynchronous
  %outer = (s32[], bf16[8,16]{1,0}) while(%init.2), condition=%outer_condition, body=%outer_body
  ROOT %mesh = f32[8,16]{1,0} all-gather(%q), replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}, dimensions={1}, metadata={op_name="end"}
}
"""


def found():
    return {item.operation.rpartition("/")[2]: item for item in Module(PROGRAM).collectives()}


def test_every_collective_as_often_as_it_runs():
    times = {name: (item.kind, item.times, item.in_loop) for name, item in found().items()}
    assert times == {
        "ppermute": ("collective-permute", 120, True),
        "weights": ("all-gather", 40, True),
        "norm": ("all-reduce", 40, True),
        "exchange": ("all-to-all", 1, False),
        "end": ("all-gather", 1, False),
    }


def test_bytes():
    assert {name: item.nbytes for name, item in found().items()} == {
        "ppermute": 8 * 16 * 2,
        "weights": 8 * 16 * 2,
        "norm": 2 * 8 * 4,
        "exchange": 8 * 16 * 2,
        "end": 8 * 16 * 4,
    }


def test_groups_lie_along_mesh_axes():
    sizes = MeshSizes(dp=2, sp=4)
    assert {name: item.axes(sizes) for name, item in found().items()} == {
        "ppermute": ("sp",),
        "weights": ("sp",),
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
