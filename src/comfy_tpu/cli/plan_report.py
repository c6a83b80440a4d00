"""A plan as text and as JSON.

One object. Its keys stay; new ones may be added:

    schema          1
    model, size     as planned
    tpu             name, slices, hosts (of all slices), chips (of one slice), devices, topology, and the figures of one
                    device
    tokens, batch   of the sequence; videos times branches, and times the windows of a call
    calls           of the program in a step: more than one for a long video
    preset          its name and settings as text, or null
    fits            the chosen layout, with a tenth of the memory to spare
    chosen          dp, sp, tp
    layouts         best first: mesh, attention, fits, memory (weights, prompt, latents, temporaries, total), flops,
                    memory_bytes, sent_bytes, seconds (compute, memory, interconnect, network, step), bound, traffic
                    (cause, kind, axes, group, count, nbytes, detail); partitioned and compiled: what was counted, or
                    null;
                    temporaries of a compiled one are all that the compiler wants beside the other three;
                    sharding: of the weights of one transformer, tensors, nbytes and bytes_per_device that are sharded,
                    gathered, replicated and in total, and could_not_split (names), or null where nothing was counted
    seed            mesh of the seed's layout, and share: bytes sent by the chosen one, of its own; or null
    larger          tpu and mesh that would fit, or null
    estimate        a sentence: by what the times are estimated
    compiler        "libtpu", or null; refused: why it did not compile, or null

With --schedule, `compiled` of the chosen layout has schedule: estimate (a sentence), compiler, clock, seconds, by_part,
by_bound, memory_bytes, collectives (exposed, hidden), operations, programs (bundles, cycles, bound, slots, loops,
regions), branches, unscheduled, uncounted_loops; or null, and schedule_refused says why.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comfy_tpu.cli.findings import printable
from comfy_tpu.cli.schedule_report import schedule_document, schedule_lines
from comfy_tpu.distribution import find_page, install_command
from comfy_tpu.parallel.layouts import fits
from comfy_tpu.parallel.traffic import crosses_slices, transfer_seconds
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.planning.compilation import ProgramCounts, has_tpu_compiler
from comfy_tpu.planning.plan import LayoutPlan, Plan, refined_seconds


def as_json(plan: Plan) -> str:
    return json.dumps(as_document(plan), indent=2)


def as_document(plan: Plan) -> dict[str, Any]:
    larger = plan.larger and {"tpu": plan.larger[0].name, "mesh": dataclasses.asdict(plan.larger[1])}
    seed = plan.seed and {"mesh": dataclasses.asdict(plan.seed.sizes), "share": plan.seed_share}
    slice_ = plan.slice
    layouts = plan.layouts if plan.chosen in plan.layouts else (*plan.layouts, plan.chosen)
    return {
        "schema": 1,
        "model": plan.model,
        "size": plan.size,
        "tpu": {
            "name": slice_.name,
            "slices": slice_.count,
            "hosts": slice_.host_count,
            "chips": slice_.chips,
            "devices": slice_.device_count,
            "topology": slice_.topology,
            "device": dataclasses.asdict(slice_.chip),
        },
        "tokens": plan.work.tokens,
        "batch": plan.work.batch,
        "calls": plan.work.calls,
        "preset": plan.preset or None,
        "fits": plan.fits,
        "chosen": dataclasses.asdict(plan.chosen.sizes),
        "layouts": [_layout_document(layout, plan) for layout in layouts],
        "seed": seed,
        "larger": larger,
        "estimate": describe_times(plan),
        "compiler": "libtpu" if has_tpu_compiler() else None,
        "refused": plan.compiler_refused,
    }


def _branch_note(plan: Plan) -> str:
    return "; one branch, so all devices work on it" if plan.work.batch == 1 and plan.slice.device_count > 1 else ""


def _layout_document(layout: LayoutPlan, plan: Plan) -> dict[str, Any]:
    guess = layout.estimate
    return {
        "mesh": dataclasses.asdict(layout.sizes),
        "attention": guess.attention,
        "fits": fits(layout.peak_bytes, plan.slice.chip),
        "memory": {**dataclasses.asdict(layout.memory), "total": layout.memory.total},
        "flops": guess.flops,
        "memory_bytes": guess.memory_bytes,
        "sent_bytes": guess.sent_bytes,
        "seconds": {
            "compute": guess.compute_seconds,
            "memory": guess.memory_seconds,
            "interconnect": guess.interconnect_seconds,
            "network": guess.network_seconds,
            "step": refined_seconds(layout, plan.slice),
        },
        "bound": guess.bound,
        "traffic": [dataclasses.asdict(item) for item in guess.traffic],
        "partitioned": _counts_document(layout.partitioned, layout),
        "compiled": _counts_document(layout.compiled, layout),
        "sharding": layout.facts.sharding.as_dict() if layout.facts else None,
    }


def _counts_document(counts: ProgramCounts | None, layout: LayoutPlan) -> dict[str, Any] | None:
    if counts is None:
        return None
    peak = counts.peak_bytes(layout.facts) if layout.facts else None
    plain = dataclasses.asdict(dataclasses.replace(counts, schedule=None))
    return {
        **plain,
        "schedule": schedule_document(counts.schedule) if counts.schedule else None,
        "sent_bytes": counts.sent_bytes,
        "unexplained": len(counts.unexplained),
        "peak_bytes": peak,
    }


def as_text(plan: Plan, encoding: str | None) -> str:
    return printable(as_lines(plan), encoding or "ascii")


def as_lines(plan: Plan) -> list[str]:
    chip = plan.slice.chip
    chips = f"{plan.slice.chips} chips" if plan.slice.chips > 1 else "1 chip"
    per = f", {chip.devices_per_chip} devices each" if chip.devices_per_chip > 1 else ""
    lines = [
        f"{plan.model}, {plan.size}: {plan.work.tokens:,} tokens × {plan.work.batch}, {_step_text(plan.work)}",
        *([f"preset {plan.preset}{_branch_note(plan)}"] if plan.preset else []),
        f"{plan.slice.name}: {chips} as {plan.slice.topology}{per}; a device has "
        f"{_gb(chip.memory_bytes)} GB at {chip.memory_bandwidth / 1e9:,.0f} GB/s, {chip.flops / 1e12:,.0f} TFLOP/s, "
        f"links of {chip.link_bandwidth / 1e9:.0f} GB/s",
        "",
        *_table(_layout_rows(plan)),
        "",
        *_chosen_lines(plan),
        "",
        *_schedule_section(plan),
        *_source_lines(plan),
    ]
    return [line.rstrip() for line in lines]


def _step_text(work: Workload) -> str:
    if work.calls == 1:
        return "one step"
    parts = "windows or tiles" if work.video_latent_bytes else "segments, one after the other"
    return f"one call of {work.calls} in a step ({parts}); s/step is of all, the rest of one"


def _layout_rows(plan: Plan) -> Iterable[Sequence[str]]:
    yield (
        "",
        "layout",
        "fits",
        "GB",
        "weights",
        "prompt",
        "latents",
        "temp.",
        "TFLOP",
        "GB r/w",
        "GB sent",
        "s/step",
        "bound",
    )
    for layout in plan.layouts if plan.chosen in plan.layouts else (*plan.layouts, plan.chosen):
        guess, memory = layout.estimate, layout.memory
        counted = "*" if layout.compiled else "+" if layout.partitioned else ""
        yield (
            "→" if layout is plan.chosen else "",
            str(layout.sizes),
            "yes" if fits(layout.peak_bytes, plan.slice.chip) else "no",
            _gb(layout.peak_bytes),
            *(_gb(part) for part in (memory.weights, memory.prompt, memory.latents, memory.temporaries)),
            _gb(guess.flops / 1e3),
            _gb(guess.memory_bytes),
            _gb(layout.sent_bytes) + counted,
            f"{refined_seconds(layout, plan.slice):.3g}",
            guess.bound,
        )


def _chosen_lines(plan: Plan) -> Iterable[str]:
    layout, chip = plan.chosen, plan.slice.chip
    share = layout.peak_bytes / chip.memory_bytes
    memory = f"{_gb(layout.peak_bytes)} of {_gb(chip.memory_bytes)} GB"
    if plan.fits:
        yield f"{layout.sizes} fits: {memory}, {1 - share:.0%} to spare."
    else:
        yield f"{layout.sizes} does not fit: {memory}, and a tenth must stay free."
        others = [str(other.sizes) for other in plan.layouts if other is not layout and other.estimate.fits]
        if others:
            yield f"Another layout does: {'; '.join(others)}."
        elif plan.larger:
            hosts = f" on {plan.larger[0].host_count} hosts" if plan.larger[0].host_count > 1 else ""
            yield f"{plan.larger[0].name} would do, as {plan.larger[1]}{hosts}."
        else:
            yield "No slice up to 256 chips would do; choose a smaller size."
    if layout.facts is not None:
        whose = "the transformer" if plan.work.models == 1 else f"each of {plan.work.models} transformers"
        yield f"Weights of {whose}, {layout.facts.sharding.summary()}."
    counts = layout.counts
    if counts is not None:
        yield ""
        yield from _table(_traffic_rows(layout, counts))
        yield ""
        yield _attention_line(layout, counts)
    yield from _host_lines(plan)
    if plan.seed and plan.seed_share is not None and plan.seed is not layout and layout.partitioned:
        yield (
            f"Against the seed's {plan.seed.sizes}: {_gb(layout.partitioned.sent_bytes)} GB sent instead of "
            f"{_gb(plan.seed.sent_bytes)}, {plan.seed_share:.0%}."
        )


def _host_lines(plan: Plan) -> Iterable[str]:
    """Which collectives leave a slice, and how to start a slice of several hosts."""
    slice_, layout = plan.slice, plan.chosen
    if slice_.host_count == 1:
        return
    page = find_page("hosts.md")
    yield f"{slice_.host_count} hosts: start the same command on each, with --coordinator auto ({page})."
    if slice_.count == 1:
        yield "The slice's own links go from host to host: no collective crosses the data centre's network."
        return
    traffic = layout.counts.traffic if layout.counts else layout.estimate.traffic
    crossing = [item for item in traffic if crosses_slices(item, slice_, layout.sizes)]
    listed = [
        f"{item.cause} ({item.kind} over {','.join(item.axes)}) {item.nbytes / 1e9:.3f} GB in "
        f"{transfer_seconds(item, slice_, layout.sizes):.3g} s"
        for item in crossing
    ]
    speed = f"{slice_.chip.network_bandwidth / 1e9:g} GB/s a device"
    yield f"Over the data centre's network between {slice_.count} slices, {speed}: {'; '.join(listed) or 'nothing'}."
    if not layout.estimate.stays_in_slices:
        axes = " and ".join(axis for axis in layout.estimate.crossing_axes if axis != "dp")
        yield (
            f"Among them {axes}, in every layer: a batch of {plan.work.batch} does not give each slice its own part. "
            "Take one larger slice instead, or more videos (--num-videos)."
        )


def _traffic_rows(layout: LayoutPlan, counts: ProgramCounts) -> Iterable[Sequence[str]]:
    guesses: dict[str, int] = {}
    for item in layout.estimate.traffic:
        guesses[item.cause] = guesses.get(item.cause, 0) + item.nbytes
    yield ("", "collective", "over", "times", "GB sent", "why")
    for item in counts.traffic:
        why = f"{item.cause} {item.detail}".strip()
        yield ("", item.kind, ",".join(item.axes), str(item.count), f"{item.nbytes / 1e9:.3f}", why)
    total = f"{layout.estimate.sent_bytes / 1e9:.3f} by formula"
    yield ("", "all", "", str(sum(item.count for item in counts.traffic)), f"{counts.sent_bytes / 1e9:.3f}", total)


def _attention_line(layout: LayoutPlan, counts: ProgramCounts) -> str:
    kernels = f"{counts.kernels} Pallas kernels in the program" if counts.kernels else "dense attention"
    squares = (*counts.square_arrays, *(layout.facts.square_arrays if layout.facts else ()))
    return f"Attention: {kernels}; " + (
        f"arrays of tokens × tokens: {', '.join(squares)}." if squares else "no array of tokens × tokens."
    )


def _source_lines(plan: Plan) -> Iterable[str]:
    compiled = plan.chosen.compiled
    if compiled is not None and compiled.memory is not None and compiled.cost is not None:
        yield (
            f"* compiled by {compiled.compiler or 'libtpu'} in {compiled.seconds:.0f} s; "
            f"{compiled.cost.get('flops', 0) / 1e12:,.1f} TFLOP and "
            f"{_gb(compiled.cost.get('bytes accessed', 0))} GB read and written with the blocks counted once."
        )
        yield _compiled_memory(plan.chosen, compiled.memory)
    elif plan.compiler_refused:
        yield plan.compiler_refused
    else:
        yield f"The TPU compiler was not asked ({_uncompiled_reason(plan)}): memory is the documented model."
    factor, page = plan.slice.chip.temporaries, find_page("plan.md")
    if factor != 1:
        yield (
            f"Temporaries{' without *' if compiled else ''} are fitted on v6e, times {factor:g} for "
            f"{plan.slice.chip.name} after what its compiler wants for one 14B model: they may be larger ({page})."
        )
    yield f"+ collectives counted in the program as XLA's partitioner splits it; the rest are formulas ({page})."
    yield describe_times(plan)


def describe_times(plan: Plan) -> str:
    step = plan.chosen.schedule
    if step is not None:
        how = f"{plan.chosen.sizes} by the schedules of {step.compiler}, the others by formula"
    else:
        how = "the share of the peak that a chip reaches is an assumption"
    return f"Times are estimates: {how}; nothing ran on a TPU."


def _schedule_section(plan: Plan) -> Iterable[str]:
    compiled, step = plan.chosen.compiled, plan.chosen.schedule
    if step is not None:
        yield from schedule_lines(step, _table)
        yield ""
    elif compiled is not None and compiled.schedule_refused:
        yield f"No schedule: {compiled.schedule_refused}. The step's time is the formula's."
    elif plan.schedule_wanted and compiled is None:
        reason = plan.compiler_refused or _uncompiled_reason(plan)
        yield f"No schedule: {reason.rstrip('.')}. The step's time is the formula's."


def _compiled_memory(layout: LayoutPlan, memory: Mapping[str, int]) -> str:
    parts = {
        name: memory[f"{name}_size_in_bytes"] for name in ("argument", "temp", "output", "generated_code", "alias")
    }
    others = parts["output"] + parts["generated_code"] - parts["alias"]
    unread = layout.facts.unread_bytes if layout.facts else 0
    return (
        f"  Its {_gb(layout.peak_bytes)} GB: arguments {_gb(parts['argument'])}, temporaries {_gb(parts['temp'])}, "
        f"results and the program itself {_gb(others)}; {_gb(unread)} of weights and latents that it does not read "
        f"stay there too. In the table temp. is all but weights, prompt and latents: {_gb(layout.memory.temporaries)}."
    )


def _uncompiled_reason(plan: Plan) -> str:
    if not plan.compiler_wanted:
        return "--no-compile"
    if platform.machine().lower() in ("x86_64", "amd64"):
        return f"libtpu is not installed: {install_command('tpu')}"
    return "libtpu is for x86_64 only: --export here and --from on such a machine"


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    listed = list(rows)
    widths = [max(len(row[column]) for row in listed) for column in range(len(listed[0]))]
    numbers = [
        all(row[column].strip("+*%").replace(".", "").replace(",", "").isdigit() for row in listed[1:] if row[column])
        for column in range(len(widths))
    ]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        )
        for row in listed
    ]


def _gb(nbytes: float) -> str:
    """Gigabytes with three significant figures, or one decimal."""
    return f"{nbytes / 1e9:,.1f}" if nbytes >= 1e10 else f"{nbytes / 1e9:.3g}"
