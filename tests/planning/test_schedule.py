"""Schedules as libtpu writes them, and the time of a step that follows. schedule_sample is one small program of Wan."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from comfy_tpu.cli import schedule_report
from comfy_tpu.cli.plan_report import _table
from comfy_tpu.cli.schedule_image import draw_schedule
from comfy_tpu.config import MeshSizes
from comfy_tpu.parallel.chips import CHIPS, parse_slice
from comfy_tpu.parallel.constraints import constrain
from comfy_tpu.parallel.mesh import abstract_placement
from comfy_tpu.planning import compilation
from comfy_tpu.planning.compilation import (
    CompilationError,
    compile_exported,
    explain_refusal,
    partition_exported,
)
from comfy_tpu.planning.hlo import Module
from comfy_tpu.planning.hlo_bytes import array_bytes, count_bytes
from comfy_tpu.planning.schedule import kernel_cycles, read_step
from comfy_tpu.planning.schedule_files import ScheduleError, parse_schedule, parse_utilization, read_schedules
from comfy_tpu.planning.twins import find_twins
from comfy_tpu.planning.worker import make_environment
from tests.planning.tpu_compiler import needs_tpu_compiler

SAMPLE = Path(__file__).with_name("schedule_sample")
V6E = parse_slice("v6e-8")
SIZES = MeshSizes(dp=2, tp=4)


def test_recorded_program():
    program = read_schedules(SAMPLE)["pad.1"]
    (loop,) = program.loops
    assert program.cycles == pytest.approx(program.bundles + (loop.trips - 1) * (loop.last - loop.first + 1), rel=0.2)
    assert program.cycles > program.bundles
    assert all(0 <= share <= 1 for share in program.shares.values())


def bundles(*lines):
    return "\n".join(f"{'0' if k == 0 else hex(k)} {line}" for k, line in enumerate(lines))


def slots(count):
    return "== CAPACITY:\nMATMUL, VSTORE, VSTORE:SPILL\n 2 2 2\n== UTILIZATION:\n" + "1 2 1\n" * count


def looped(*body, trips=12):
    """A loop of 12 iterations over a grid whose inner dimension has 4; regions behind branches are 100 bundles."""
    head = (
        "LB: > { %s1 = sphi %s0, %s9 /* iteration index, stage = 0 iter bound = 1 */ } /* Start region 9 */",
        "   : > { %p1_p1 = scmp.ge.s32.totalorder %s2, 4 }",
        "   : > { %s9 = smov.u32 (%p1_p1, %s2), 0 /* copy :: iteration index, stage = 0 iter bound = 1 */ }",
    )
    tail = (
        f"   : > {{ %p2_p2 = scmp.ge.s32.totalorder %s8, {trips} /* loop exit test */ }}",
        "   :  { %9 = sbr.rel (!%p2_p2) target = $region9 }",
    )
    lines = (*head, *body, *tail)
    return parse_schedule("kernel", bundles(*lines), slots(len(lines))), len(lines)


def guarded(definition, predicate, region, length=100):
    delay = ["   : > {}"] * 4
    inside = ["   : > {}"] * length
    return [
        f"   : > {{ {definition} }}",
        f"   : > {{ %3 = sbr.rel (%{predicate}) target = $region{region} }}",
        *delay,
        *inside,
        f"PF: > {{}} /* Start/End empty region {region} */",
    ]


def test_a_region_behind_a_grid_index_runs_once_a_row():
    program, count = looped(*guarded("%p5_p5 = scmp.ne.s32.totalorder %s1, 3", "p5_p5", 5))
    assert program.cycles == 12 * (count - 100) + 12 * 100 / 4
    assert program.undecided_branches == 0
    assert program.spill_share == pytest.approx(0.5)


def test_an_index_is_not_read_from_the_line_before_it():
    body = guarded("%p5_p5 = scmp.ne.s32.totalorder %s7, 3", "p5_p5", 5)
    loads = (
        "   : > { %s6 = sld [smem:[#a]] }",
        "   : > { %s7 = sld [smem:[#b]] /* iteration index, iter bound = 1 */ }",
    )
    program, count = looped(*loads, *body)
    assert program.cycles == 12 * (count - 100) + 12 * 100 / 4


# The same index in the splash kernel by three versions: what sets it back to 0, and where it was loaded again.
INDEX_FORMS = {
    "0.0.51": (
        "%s9 = smov.u32 (%p1_p1, %s2), 0 /* iteration index, stage = 0 iter bound = 3 */",
        "%s7 = sld [smem:[#allocation26_spill]] /* iteration index, stage = 1 iter bound = 3 */",
    ),
    "0.0.50.1": (
        "%s9 = smov (%p1_p1, %s2), 0 /* iteration index, stage = 0 iter bound = 3 */",
        "%s7 = sld [smem:[#allocation26_spill]] /* iteration index, stage = 1 iter bound = 3 */",
    ),
    "0.0.42.1": ("%s9 = smov (%p1_p1, %s2), 0", "%s7 = sld [smem:[#allocation27_spill]]"),
}


@pytest.mark.parametrize("libtpu", INDEX_FORMS)
def test_a_grid_index_is_known_in_the_listings_of_each_libtpu(libtpu):
    wrap, load = INDEX_FORMS[libtpu]
    lines = (
        "LB: > { %s1 = sphi %s0, %s8 /* iteration index, stage = 0 iter bound = 3 */ } /* Start region 9 */",
        "   : > { %s5 = sphi %s4, %s3 /* iteration index, stage = 1 iter bound = 3 */ }",
        "   : > { %77 = sst [smem:[#allocation27_spill]] %s5  ;;  %s2 = sadd.s32 1, %s1 }",
        "   : > { %p1_p1 = scmp.ge.s32.totalorder %s2, 4 }",
        f"   : > {{ {wrap} }}",
        f"   : > {{ {load} }}",
        *guarded("%p5_p5 = scmp.ne.s32.totalorder %s7, 3", "p5_p5", 5),
        "   : > { %p2_p2 = scmp.ge.s32.totalorder %s88, 12 /* loop exit test */ }",
        "   :  { %9 = sbr.rel (!%p2_p2) target = $region9 }",
    )
    program = parse_schedule("kernel", bundles(*lines), slots(len(lines)))
    assert program.cycles == pytest.approx(11 * (len(lines) - 100) + 11 * 100 / 4)
    assert program.undecided_branches == 0


IN_PLACE = """
%body (given: bf16[4096,1024], part: bf16[256,1024], at: s32[]) -> bf16[4096,1024] {
  %given = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %part = bf16[256,1024]{1,0:T(8,128)(2,1)} parameter(1)
  %at = s32[] parameter(2)
  ROOT %set = bf16[4096,1024]{1,0:T(8,128)(2,1)} dynamic-update-slice(%given, %part, %at, %at)
}

ENTRY %main (a: bf16[4096,1024], b: bf16[256,1024], c: s32[]) -> bf16[4096,1024] {
  %a = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[256,1024]{1,0:T(8,128)(2,1)} parameter(1)
  %c = s32[] parameter(2)
  ROOT %fused = bf16[4096,1024]{1,0:T(8,128)(2,1)} fusion(%a, %b, %c), kind=kLoop, calls=%body
}
"""


def test_an_array_that_is_updated_in_place_is_not_read():
    module = Module(IN_PLACE)
    fusion = next(item for item in module.computation("main") if item.name == "fused")
    assert count_bytes(module, fusion) <= 2 * 256 * 1024 * 2 + 4


SLICES = """
ENTRY %main (a: bf16[4096,1024], c: s32[]) -> bf16[4096,1024] {
  %a = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %c = s32[] parameter(1)
  %part = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%a, %c, %c), dynamic_slice_sizes={256,1024}
  %copied = bf16[256,1024]{1,0:T(8,128)(2,1)} slice(%a), slice={[0:256], [0:1024]}
  ROOT %set = bf16[4096,1024]{1,0:T(8,128)(2,1)} dynamic-update-slice(%a, %part, %c, %c)
}
"""


@pytest.mark.parametrize(("name", "parts"), [("part", 1), ("copied", 2), ("set", 1)])
def test_a_slice_outside_of_a_fusion_touches_a_part_too(name, parts):
    module = Module(SLICES)
    (instruction,) = (item for item in module.computation("main") if item.name == name)
    assert count_bytes(module, instruction) == parts * 256 * 1024 * 2


def test_of_regions_that_exclude_each_other_the_smaller_is_counted():
    program, count = looped(
        *guarded("%p5_p5 = scmp.gt.s32.totalorder %s3, %s4", "p5_p5", 5, length=150),
        *guarded("%p6_p6 = scmp.le.s32.totalorder %s3, %s4", "p6_p6", 6, length=120),
    )
    assert program.cycles == 12 * (count - 150)
    assert program.undecided_branches == 2


def test_forms_that_are_not_known():
    with pytest.raises(ScheduleError, match="wrote no schedule"):
        read_schedules(Path(__file__).parent / "nowhere")
    with pytest.raises(ScheduleError, match="in a form that is not known"):
        parse_utilization("something else")
    with pytest.raises(ScheduleError, match="the slots of unknown units: VMX"):
        parse_utilization(slots(1).replace("VSTORE,", "VMX,"))
    with pytest.raises(ScheduleError, match="lists 1 bundles, but slots of 2"):
        parse_schedule("x", "0 : { }", slots(2))


def test_matrix_units_have_one_name():
    assert parse_utilization(slots(2).replace("MATMUL", "MXU")).units == parse_utilization(slots(2)).units
    with pytest.raises(ScheduleError, match="in a form that is not known"):
        parse_utilization(slots(2).replace("MATMUL", "VALU"))


def test_rows_faster_than_the_matrix_units_take_them_wait():
    program = dataclasses.replace(read_schedules(SAMPLE)["pad.1"], matmuls=1e6)
    units = program.capacity["MATMUL"]
    assert kernel_cycles(program, V6E) == 1e6 * 8 / units


@pytest.mark.parametrize(("name", "operations"), [("v5e", 131072), ("v5p", 262144), ("v6e", 524288), ("v7x", 524288)])
def test_clocks_follow_from_the_peaks(name, operations):
    assert CHIPS[name].flops / operations == pytest.approx(CHIPS[name].clock, rel=0.001)


PROGRAM = Path(__file__).with_name("scheduled_program.hlo").read_text(encoding="utf-8")


@pytest.fixture
def step():
    return read_step(SAMPLE, PROGRAM, V6E, SIZES, "libtpu 9.9")


def test_instructions_that_are_alike_share_a_schedule():
    assert find_twins(Module(PROGRAM), ["pad.1"]) == {"pad.1": "pad.1", "pad.2": "pad.1"}


def test_bytes_of_a_slice_and_of_padding():
    module = Module(PROGRAM)
    fusion = next(item for item in module.computation("main") if item.name == "pad.1")
    assert count_bytes(module, fusion) == 2 * 1024 * 1024 * 2 + 4, "the slice, the result, and the index"
    assert array_bytes("f32[10,64]{1,0:T(8,128)}") == 16 * 128 * 4
    assert array_bytes("f32[10,64]{1,0:T(8,128)S(1)}") == 0


def test_a_collective_costs_what_nothing_hides(step):
    (ring,) = step.collectives
    others = sum(item.seconds for item in step.operations if item.name.startswith("pad"))
    assert ring.seconds == pytest.approx(ring.transfer_seconds - others)
    assert set(ring.beside) == {"pad.1", "pad.2"}
    assert ring.hidden_seconds == pytest.approx(others)


GATHER_START = """  %start = ((bf16[1024,4096]{1,0}), bf16[4096,4096]{1,0}, (s32[8192]{0}, s32[0]{0:S(2)})) \
custom-call-start(%x), custom_call_target="TODO(b/522284627)", called_computations={%gathered}"""
EXCHANGE_START = """  %start = ((bf16[4096,4096]{1,0}), bf16[4096,4096]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
all-to-all-start(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, metadata={op_name="ring"}"""
GATHERED = """
%gathered (x.3: bf16[1024,4096]) -> bf16[4096,4096] {
  %x.3 = bf16[1024,4096]{1,0} parameter(0)
  ROOT %own = bf16[4096,4096]{1,0} all-gather(%x.3), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, \
metadata={op_name="ring"}
}, execution_thread="sparsecore"

ENTRY"""


@pytest.mark.parametrize(
    ("start", "done"),
    [(GATHER_START, "custom-call-done"), (EXCHANGE_START, "all-to-all-done")],
    ids=["gather", "a2a"],
)
def test_a_transfer_is_hidden_only_by_what_stands_between_start_and_done(start, done):
    lines = [start if line.startswith("  %start = ") else line for line in PROGRAM.splitlines()]
    text = "\n".join(lines).replace("collective-permute-done", done).replace("\nENTRY", GATHERED)
    (ring,) = read_step(SAMPLE, text, V6E, SIZES, "").collectives
    assert (ring.source, set(ring.beside)) == ("ring", {"pad.1", "pad.2"})
    assert 0 < ring.hidden_seconds == pytest.approx(ring.transfer_seconds - ring.seconds)
    at_once = text.splitlines()
    awaited = next(line for line in at_once if line.startswith("  %done = "))
    at_once.remove(awaited)
    at_once.insert(at_once.index(start.splitlines()[-1]) + 1, awaited)
    (ring,) = read_step(SAMPLE, "\n".join(at_once), V6E, SIZES, "").collectives
    assert ring.beside == ()
    assert ring.hidden_seconds == 0
    assert ring.seconds == pytest.approx(ring.transfer_seconds)


def test_the_cheapest_branch_is_counted_and_the_other_told(step):
    (branch,) = step.branches
    assert branch.counted == "exact"
    assert branch.seconds["exact"] < branch.seconds["short"]


def test_the_report_says_that_it_is_an_estimate(step):
    lines = list(schedule_report.schedule_lines(step, _table))
    said = "An estimate by the static schedules of libtpu 9.9 at 1.751 GHz; nothing ran on a TPU."
    assert said in lines[0]
    assert said in schedule_report.schedule_document(step)["estimate"]
    assert said in draw_schedule(step, "a <title>")
    assert "a &lt;title&gt;" in draw_schedule(step, "a <title>")
    assert any("the cheapest branch exact is counted" in line for line in lines)
    assert sum(step.seconds_by_part.values()) == pytest.approx(step.seconds)
    assert sum(step.seconds_by_bound.values()) == pytest.approx(step.seconds)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ('INVALID_ARGUMENT: Topology layout "v6e:3x5" is not divisible', "does not know this topology: INVALID"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem", "because a kernel does not fit in VMEM: RES"),
        ("RESOURCE_EXHAUSTED: 33G of 31G hbm", "refused the program: RESOURCE_EXHAUSTED"),
    ],
)
def test_which_limit_was_met(reason, said):
    assert said in explain_refusal("the TPU compiler", reason)


def test_flags_are_added_to_those_that_are_set(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine=1")
    request = {"mode": "compile", "accelerator": "v6e-8", "schedule": "/somewhere"}
    assert make_environment(request)["LIBTPU_INIT_ARGS"].startswith("--mine=1 --xla_jf_dump_to=/somewhere ")
    assert make_environment({**request, "schedule": None})["LIBTPU_INIT_ARGS"] == "--mine=1"


@pytest.mark.slow
@pytest.mark.tpu
@needs_tpu_compiler
def test_the_tpu_compiler_writes_schedules(capsys):
    from comfy_tpu.cli import main as cli

    assert cli.main(["plan", "demo", "--tpu", "v6e-4", "--mesh", "dp=2,sp=2", "--schedule"]) == 0
    assert "One step by schedule: " in capsys.readouterr().out


def gathering_program(sizes):
    """A scan of four layers on v6e, each with a gather of weights over sp beside a product, as jax.export writes it."""
    placement = abstract_placement(sizes, platform="tpu", chip="v6e")

    def step(x, first, second):
        def layer(x, weights):
            own, gathered = weights
            return jnp.tanh(x @ own) @ constrain(gathered, placement, PartitionSpec()), None

        return jax.lax.scan(layer, x, (first, second))[0]

    def array(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placement.sharding(*axes))

    shape = (4, 4096, 4096)
    arguments = array((65_536, 4096), ("dp", "sp")), array(shape), array(shape, None, "sp")
    return bytes(jax.export.export(jax.jit(step), platforms=["tpu"])(*arguments).serialize())


GATHERING = MeshSizes(dp=2, sp=4)


def test_any_exported_program_is_partitioned():
    module = partition_exported(gathering_program(GATHERING), V6E, GATHERING)
    (gather,) = module.collectives()
    assert (gather.kind, gather.times, gather.axes(GATHERING)) == ("all-gather", 4, ("sp",))
    assert gather.nbytes == 2 * 4096 * 4096
    assert module.product_flops() == 4 * 2 * 2 * (65_536 // 8) * 4096 * 4096


def test_a_program_that_is_none_is_refused():
    with pytest.raises(CompilationError, match=r"XLA's partitioner refused the program: \w+"):
        partition_exported(b"no program", V6E, GATHERING)


def test_a_compiler_that_writes_no_schedule_leaves_the_formula(tmp_path, monkeypatch):
    def compile_without(directory, mode):
        (directory / "program.hlo").write_text(PROGRAM, encoding="utf-8")
        report = {"seconds": 1.0, "compiler": "libtpu 0.0", "memory": {}, "cost": {}}
        (directory / "report.json").write_text(json.dumps(report), encoding="utf-8")

    monkeypatch.setattr(compilation, "_run_process", compile_without)
    monkeypatch.setattr(compilation, "has_tpu_compiler", lambda: True)
    said = "libtpu wrote no schedule: this version does not know the flags that ask for one"
    with pytest.raises(ScheduleError, match=said):
        compile_exported(b"", V6E, SIZES)
    work = SimpleNamespace(sequence=1, dense_max_tokens=2, text_tokens=1)
    facts = SimpleNamespace(slice=V6E, sizes=SIZES, weight_shapes=(), work=work)
    counts = compilation.count_program(SimpleNamespace(facts=facts, serialized=b""), "compile", schedule=True)
    assert (counts.schedule, counts.schedule_refused) == (None, said)


def test_short_steps_are_told_in_milliseconds(step):
    short = dataclasses.replace(step, operations=(dataclasses.replace(step.operations[0], times=1, seconds=4e-4),))
    lines = list(schedule_report.schedule_lines(short, _table))
    assert [line.split()[:3] for line in lines if line.split()[:1] == ["part"]] == [["part", "ms", "share"]]
    assert any("0.400" in line for line in lines)
    assert "0.400 ms, 100%" in draw_schedule(short, "")


def test_nothing_is_compiled_without_the_tpu_compiler(monkeypatch):
    monkeypatch.setattr(compilation, "has_tpu_compiler", lambda: False)
    with pytest.raises(CompilationError, match=r"libtpu, the TPU's compiler, is not installed; on Linux with x86_64: "):
        compile_exported(b"no program", V6E, GATHERING)


@pytest.mark.slow
@pytest.mark.tpu
@needs_tpu_compiler
def test_a_program_that_names_no_mesh_is_compiled_for_the_tpu():
    given = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    exported = jax.export.export(jax.jit(lambda x: x @ x), platforms=["tpu"])(given)
    step, _ = compile_exported(bytes(exported.serialize()), parse_slice("v6e-1"), MeshSizes())
    assert step.seconds_by_part["products"] > 0


@pytest.mark.slow
@pytest.mark.tpu
@needs_tpu_compiler
def test_the_tpu_compiler_puts_gathers_beside_products():
    step, report = compile_exported(gathering_program(GATHERING), V6E, GATHERING)
    (gather,) = step.collectives
    assert gather.times == 4
    assert gather.hidden_seconds == pytest.approx(gather.times * gather.transfer_seconds)
    assert gather.beside
    assert step.seconds_by_part["products"] >= 2 * 4 * 2 * (65_536 // 8) * 4096 * 4096 / V6E.chip.flops
    assert step.compiler == report["compiler"]
    assert report["compiler"].startswith("libtpu ")
    assert report["memory"]["argument_size_in_bytes"] > 0
