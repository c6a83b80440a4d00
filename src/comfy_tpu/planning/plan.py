"""The plan: every layout by formula, the best few counted in the partitioned program, the chosen one compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from comfy_tpu.config import GenerationSettings, MeshSizes
from comfy_tpu.errors import MeshError
from comfy_tpu.families import settings
from comfy_tpu.parallel.chips import Slice
from comfy_tpu.parallel.layouts import (
    Estimate,
    Memory,
    best_layout,
    compute_seconds,
    estimate,
    fits,
    rank_layouts,
    valid_layouts,
)
from comfy_tpu.parallel.mesh import parse_mesh
from comfy_tpu.parallel.traffic import transfer_seconds
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.checks import check_context
from comfy_tpu.planning.compilation import CompilationError, ProgramCounts, count_program, has_tpu_compiler
from comfy_tpu.planning.models import PlannedModel
from comfy_tpu.planning.program import ProgramFacts, StepProgram, lower_step
from comfy_tpu.planning.schedule import StepSchedule

COUNTED_LAYOUTS = 3
"""Layouts whose partitioned program is counted, from the best; each takes seconds."""

MessageCallback = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class LayoutPlan:
    estimate: Estimate
    facts: ProgramFacts | None = None
    partitioned: ProgramCounts | None = None
    compiled: ProgramCounts | None = None

    @property
    def sizes(self) -> MeshSizes:
        return self.estimate.sizes

    @property
    def counts(self) -> ProgramCounts | None:
        """The counts of the TPU compiler's program, else of the partitioned one."""
        return self.compiled or self.partitioned

    @property
    def schedule(self) -> StepSchedule | None:
        return self.compiled.schedule if self.compiled else None

    @property
    def sent_bytes(self) -> int:
        return self.counts.sent_bytes if self.counts else self.estimate.sent_bytes

    @property
    def memory(self) -> Memory:
        """The estimate; its temporaries are those of the compiler where the program was compiled."""
        guess = self.estimate.memory
        compiled = self.compiled.peak_bytes(self.facts) if self.compiled and self.facts else None
        rest = guess.total - guess.temporaries
        return guess if compiled is None else dataclasses.replace(guess, temporaries=compiled - rest)

    @property
    def peak_bytes(self) -> int:
        return self.memory.total


@dataclasses.dataclass(frozen=True)
class Plan:
    model: str
    size: str
    slice: Slice
    work: Workload
    layouts: tuple[LayoutPlan, ...]
    """Best first."""
    chosen: LayoutPlan
    seed: LayoutPlan | None
    """The layout of the first published node pack (dp=2, columns over tp); None if the slice cannot have it."""
    larger: tuple[Slice, MeshSizes] | None
    """A slice and mesh that fit if the chosen layout does not."""
    compiler_refused: str | None
    compiler_wanted: bool = True
    schedule_wanted: bool = False
    preset: str = ""
    """The preset whose settings are planned, and these settings; empty: none."""

    @property
    def fits(self) -> bool:
        refused = self.compiler_refused or ""
        out_of_memory = "RESOURCE_EXHAUSTED" in refused and "VMEM" not in refused
        return not out_of_memory and fits(self.chosen.peak_bytes, self.slice.chip)

    @property
    def seed_share(self) -> float | None:
        """Bytes sent as a share of those of the seed's layout, both counted in the same way."""
        ours, seed = self.chosen.partitioned, self.seed and self.seed.partitioned
        return ours.sent_bytes / seed.sent_bytes if ours and seed and seed.sent_bytes else None


def parse_size(text: str, model: PlannedModel, **chosen: Any) -> GenerationSettings:
    """Settings from "1280x720x81", "1280x720", or a size's name such as "720P"; the others are the model's defaults."""
    return settings.parse_size(text, model.family.card, model.defaults, chosen)


def make_plan(
    model: PlannedModel,
    settings: GenerationSettings,
    slice_: Slice,
    *,
    mesh: str = "auto",
    compile_: bool = True,
    schedule: bool = False,
    on_progress: MessageCallback = lambda text: None,
) -> tuple[Plan, StepProgram]:
    """The plan, and the program of the chosen layout."""
    check_context(model.family.card, model.name, settings)
    works = model.workloads(settings)
    work, chosen = best_layout(works, slice_) if mesh.strip() == "auto" else _requested_layout(mesh, works, slice_)
    ranking = rank_layouts(work, slice_)
    seed = next((e for e in ranking if e.sizes == _seed_layout(slice_.device_count)), None)
    wanted = [chosen.sizes, *(e.sizes for e in ranking[: COUNTED_LAYOUTS if mesh.strip() == "auto" else 0])]
    wanted += [seed.sizes] if seed else []
    programs: dict[MeshSizes, StepProgram] = {}
    plans = {e.sizes: LayoutPlan(e) for e in (*ranking, chosen)}
    for sizes in dict.fromkeys(wanted):
        on_progress(f"counting {sizes}")
        program = lower_step(model, settings, work, slice_, sizes)
        if sizes == chosen.sizes:
            programs[sizes] = program
        plans[sizes] = dataclasses.replace(
            plans[sizes], facts=program.facts, partitioned=count_program(program, "partition")
        )
    program = programs[chosen.sizes]
    plans[chosen.sizes], refused = _compile_layout(plans[chosen.sizes], program, compile_, schedule, on_progress)
    plan = Plan(
        model=model.name,
        size=program.facts.size,
        slice=slice_,
        work=work,
        layouts=tuple(plans[e.sizes] for e in ranking),
        chosen=plans[chosen.sizes],
        seed=plans[seed.sizes] if seed else None,
        larger=None,
        compiler_refused=refused,
        compiler_wanted=compile_,
        schedule_wanted=schedule,
    )
    return (plan if plan.fits else dataclasses.replace(plan, larger=_larger(work, slice_))), program


def plan_program(
    program: StepProgram,
    *,
    compile_: bool = True,
    schedule: bool = False,
    on_progress: MessageCallback = lambda text: None,
) -> Plan:
    """The plan of one exported program, which may come from another machine."""
    facts = program.facts
    layout = LayoutPlan(estimate(facts.work, facts.sizes, facts.slice), facts)
    on_progress(f"counting {facts.sizes}")
    layout = dataclasses.replace(layout, partitioned=count_program(program, "partition"))
    layout, refused = _compile_layout(layout, program, compile_, schedule, on_progress)
    plan = Plan(
        facts.model, facts.size, facts.slice, facts.work, (layout,), layout, None, None, refused, compile_, schedule
    )
    return plan if plan.fits else dataclasses.replace(plan, larger=_larger(facts.work, facts.slice))


def refined_seconds(layout: LayoutPlan, slice_: Slice) -> float:
    """Seconds of a step from the schedules of its program, else from its counts, else from the formulas."""
    counted, guess = layout.counts, layout.estimate
    if layout.schedule is not None:
        return guess.calls * layout.schedule.seconds
    if counted is None:
        return guess.step_seconds
    products = layout.partitioned.product_flops if layout.partitioned else None
    matmul = guess.matmul_flops if products is None else products
    compute = compute_seconds(matmul, counted.kernel_flops or guess.attention_flops, slice_.chip)
    transfers = sum(transfer_seconds(item, slice_, layout.sizes) for item in counted.traffic)
    return guess.calls * (max(compute, guess.memory_seconds) + transfers)


def _compile_layout(
    layout: LayoutPlan, program: StepProgram, compile_: bool, schedule: bool, on_progress: MessageCallback
) -> tuple[LayoutPlan, str | None]:
    if not compile_ or not has_tpu_compiler():
        return layout, None
    if program.facts.slice.count > 1:
        return layout, "The TPU compiler was not asked: it is asked for one slice at a time."
    how_long = "with its schedules, two to six minutes" if schedule else "about a minute"
    on_progress(f"compiling {layout.sizes} for {program.facts.slice_name} with libtpu, {how_long}")
    try:
        return dataclasses.replace(layout, compiled=count_program(program, "compile", schedule=schedule)), None
    except CompilationError as error:
        return layout, str(error)


def _requested_layout(mesh: str, works: Sequence[Workload], slice_: Slice) -> tuple[Workload, Estimate]:
    """The first of these workloads that the mesh divides, and its cost."""
    sizes = parse_mesh(mesh, slice_.device_count)
    for work in works:
        possible = valid_layouts(work, slice_.device_count)
        if sizes in possible:
            return work, estimate(work, sizes, slice_)
    raise MeshError(
        f"mesh {sizes} does not suit {slice_.name} and this model; choose from {'; '.join(map(str, possible))}",
        field="mesh",
    )


def _seed_layout(device_count: int) -> MeshSizes:
    return MeshSizes(dp=2, tp=device_count // 2) if device_count > 1 else MeshSizes()


def _larger(work: Workload, slice_: Slice) -> tuple[Slice, MeshSizes] | None:
    candidate = slice_
    while (larger := candidate.next_larger()) is not None:
        best = rank_layouts(work, larger)[0]
        if best.fits:
            return larger, best.sizes
        candidate = larger
    return None
