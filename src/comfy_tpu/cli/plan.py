"""comfy-tpu plan: memory, traffic and step time of a model on a TPU slice, before the slice is rented.

The exit status is 1 if the step does not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from comfy_tpu.cli import card_texts
from comfy_tpu.cli.options import CONTEXT_SETTINGS, add_context, add_ignored_keys, path_parser
from comfy_tpu.errors import InvalidValueError

if TYPE_CHECKING:
    from comfy_tpu.planning.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a directory, the id of a known model, or demo")
    parser.add_argument("--tpu", metavar="SLICE", help="v5e, v5p, v6e or v7x, 1 to 256 chips: v6e-8; several: 2xv6e-8")
    parser.add_argument("--size", metavar="SIZE", help="1280x720x81, or 480P, 720P (default: the model's)")
    parser.add_argument("--num-videos", type=int, default=1, metavar="N", help="videos from one prompt (1)")
    parser.add_argument("--no-guidance", action="store_true", help="one branch: no negative prompt")
    parser.add_argument(
        "--preset", metavar="NAME", help=f"the settings of a preset: {card_texts.preset_names()} (default: none)"
    )
    add_context(parser)
    add_ignored_keys(parser)
    parser.add_argument("--mesh", help="choose this layout instead of the best: dp=2,sp=4, or seed")
    parser.add_argument(
        "--export", type=path_parser("--export"), metavar="FILE", help="also write the program, to compile it elsewhere"
    )
    parser.add_argument(
        "--from", dest="from_", type=path_parser("--from"), metavar="FILE", help="plan a program that --export wrote"
    )
    parser.add_argument("--no-compile", action="store_true", help="do not ask the TPU compiler, also if it is here")
    parser.add_argument(
        "--schedule", action="store_true", help="estimate the step from the TPU compiler's schedules; takes minutes"
    )
    parser.add_argument(
        "--schedule-image",
        type=path_parser("--schedule-image"),
        metavar="FILE",
        help="also draw that estimate, as SVG",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli.plan_report import as_json, as_text
    from comfy_tpu.cli.schedule_image import write_image
    from comfy_tpu.cli.terminal import print_message

    _check_schedule(arguments)
    plan = _plan_from_file(arguments) if arguments.from_ else _plan_from_model(arguments)
    if arguments.schedule_image is not None:
        if plan.chosen.schedule is None:
            print_message(f"{arguments.schedule_image} was not written: there is no schedule to draw")
        else:
            title = f"{plan.model}, {plan.size}, {plan.slice.name}, {plan.chosen.sizes}"
            write_image(arguments.schedule_image, plan.chosen.schedule, title)
    print(as_json(plan) if arguments.json else as_text(plan, sys.stdout.encoding))
    return 0 if plan.fits else 1


def _check_schedule(arguments: argparse.Namespace) -> None:
    from comfy_tpu.pipeline.atomic import check_place

    if arguments.schedule_image is not None:
        if not arguments.schedule:
            raise InvalidValueError("schedule_image needs --schedule; add it", field="schedule_image")
        if arguments.schedule_image.suffix.lower() != ".svg":
            raise InvalidValueError(
                f"schedule_image={arguments.schedule_image} is no SVG file; end its name with .svg",
                field="schedule_image",
            )
        check_place(arguments.schedule_image, field="schedule_image")
    if arguments.schedule and arguments.no_compile:
        raise InvalidValueError("schedule comes from the TPU compiler; leave out --no-compile", field="schedule")


def _plan_from_file(arguments: argparse.Namespace) -> Plan:
    given = [
        name for name in ("model", "tpu", "size", "mesh", "export", "preset") if getattr(arguments, name) is not None
    ]
    if given:
        raise InvalidValueError(f"from={arguments.from_} brings its own {given[0]}; leave that out", field="from")
    from comfy_tpu.cli.terminal import print_message
    from comfy_tpu.planning.plan import plan_program
    from comfy_tpu.planning.program_file import read_program

    return plan_program(
        read_program(arguments.from_),
        compile_=not arguments.no_compile,
        schedule=arguments.schedule,
        on_progress=print_message,
    )


def _plan_from_model(arguments: argparse.Namespace) -> Plan:
    if arguments.model is None or arguments.tpu is None:
        raise InvalidValueError("plan needs a MODEL and --tpu, or --from; try: comfy-tpu plan demo --tpu v6e-8")
    from comfy_tpu.cli.terminal import print_message
    from comfy_tpu.families.presets import describe_settings, find_preset
    from comfy_tpu.families.settings import merge_choices
    from comfy_tpu.parallel.chips import parse_slice
    from comfy_tpu.pipeline.model_files import list_model_files
    from comfy_tpu.pipeline.path_conflicts import check_conflicts
    from comfy_tpu.planning.models import find_model
    from comfy_tpu.planning.plan import make_plan, parse_size
    from comfy_tpu.planning.program_file import check_export, write_program

    slice_ = parse_slice(arguments.tpu)
    if arguments.export is not None:
        check_export(arguments.export)
    model = find_model(arguments.model, arguments.ignore_config_key)
    if arguments.export is not None:
        check_conflicts([("export", arguments.export)], list_model_files(Path(arguments.model)))
    size = arguments.size or f"{model.defaults.width}x{model.defaults.height}x{model.defaults.num_frames}"
    off = {"guidance_scale": model.family.card.guidance_off} if arguments.no_guidance else {}
    chosen = {"num_videos": arguments.num_videos, **off}
    preset = (
        None if arguments.preset is None else find_preset(model.presets, arguments.preset, model.name, takes_auto=False)
    )
    chosen = merge_choices({} if preset is None else preset.settings, chosen)
    chosen |= {name: getattr(arguments, name) for name in CONTEXT_SETTINGS}
    plan, program = make_plan(
        model,
        parse_size(size, model, **chosen),
        slice_,
        mesh=arguments.mesh or "auto",
        compile_=not arguments.no_compile,
        schedule=arguments.schedule,
        on_progress=print_message,
    )
    if preset is not None:
        plan = dataclasses.replace(plan, preset=f"{arguments.preset}: {describe_settings(preset.settings)}")
    if arguments.export is not None:
        write_program(arguments.export, program)
        print_message(f"{arguments.export}: the program of {plan.chosen.sizes}")
    return plan
