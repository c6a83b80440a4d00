"""comfy-tpu port: what stands between a PyTorch model and a TPU.

`check` exits with 0 if the model will run (with --static: if nothing was found that stops it) and with 1 if it will
not, or could not be tried. `ops` exits with 1 if an operator is missing, or the list is not whole, `bisect` if a
module differs from PyTorch. The keys of --json are described in src/comfy_tpu/porting/report.py, those of `bisect` in
bisect.py beside it. `new` is in port_new.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_tpu.cli import port_new
from comfy_tpu.cli.findings import printable
from comfy_tpu.cli.options import number_parser, path_parser
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.json_input import parse_json

if TYPE_CHECKING:
    from comfy_tpu.bench.results import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check",
        help="find what stops a model on a TPU, or costs there, line by line",
        description="Reads the model's source, then builds a small one, traces it, lowers it for a TPU and compares it "
        "with PyTorch. The second part imports and runs the model's code; --static leaves it out.",
    )
    check.add_argument("--static", action="store_true", help="only read the source: nothing of it is imported or run")
    check.add_argument(
        "--bench",
        type=path_parser("--bench"),
        metavar="FILE",
        help="measured steps, from comfy-tpu bench --json: whether the model is as fast as the plan expects",
    )
    check.set_defaults(port=_check)
    ops = commands.add_parser(
        "ops",
        help="list a model's operators, and who implements each",
        description="Builds a small model and traces it: this imports and runs the model's code.",
    )
    ops.set_defaults(port=_ops)
    new = commands.add_parser(
        "new",
        help="write a family for a pipeline of diffusers, and its parity test",
        description="Builds a small random pipeline, watches how it calls its parts, and writes a family that does the "
        "same: into a checkout of comfy-tpu, or with --pack as a pack of its own. Nothing is overwritten.",
    )
    port_new.add_arguments(new)
    new.set_defaults(port=port_new.run)
    bisect = commands.add_parser(
        "bisect",
        help="find the module whose compiled program differs from PyTorch",
        description="Runs a small model in PyTorch, then traces and compiles each of its modules on the same inputs, "
        "and opens the first that differs. This imports and runs the model's code.",
    )
    bisect.add_argument(
        "--checkpoint",
        type=path_parser("--checkpoint"),
        metavar="DIR",
        help="the model of a directory with config.json and safetensors files, with its weights",
    )
    bisect.add_argument("--dtype", default="float32", help="float32 or bfloat16 (float32)")
    bisect.add_argument(
        "--tolerance", type=number_parser(float), metavar="X", help="relative error (0.001; in bfloat16 0.03)"
    )
    bisect.set_defaults(port=_bisect)
    for command in (check, ops, bisect):
        command.add_argument(
            "target", metavar="TARGET", help="a class of diffusers, a model directory, model.py[:Class] or module:Class"
        )
        command.add_argument("--config", metavar="JSON", help="""what the class is built with: '{"width": 32}'""")
        command.add_argument(
            "--inputs", metavar="JSON", help="""shapes of its inputs: '{"x": [1, 16], "t": {"value": 3}}'"""
        )
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    if not getattr(arguments, "static", False):
        from comfy_tpu.parallel.runtime_flags import check_runtime_flags

        check_runtime_flags()
    status: int = arguments.port(arguments)
    return status


def _check(arguments: argparse.Namespace) -> int:
    from comfy_tpu.bench.results import read_runs
    from comfy_tpu.porting.check import check
    from comfy_tpu.porting.report import format_json, format_text
    from comfy_tpu.porting.targets import find_targets

    given: dict[str, Any] = {"config": _object(arguments, "config"), "inputs": _object(arguments, "inputs")}
    runs = [] if arguments.bench is None else read_runs(arguments.bench)
    targets = find_targets(arguments.target)
    with _models_print_to_stderr():
        checks = [
            check(target, static=arguments.static, **given, **_measured_speed(arguments.bench, runs, target.name))
            for target in targets
        ]
    print(format_json(checks) if arguments.json else _printable(format_text(checks)))
    return 1 if any(each.blocked for each in checks) else 0


def _measured_speed(file: Path | None, runs: Sequence[Run], class_name: str) -> dict[str, Any]:
    """The slowest step beside its estimate, of the last run that measured the class."""
    from comfy_tpu.porting.checklists import Speed

    if file is None:
        return {}
    measured = [
        (run, row)
        for run in runs
        for row in run.find("transformer", what="forward")
        if row.peer == "ours" and row.median_s and class_name in row.facts.get("classes", ())
    ]
    if not measured:
        return {"no_speed": f"{file} has no step of {class_name}"}
    last = measured[-1][0]
    device = last.hardware.get("device")
    speeds = [
        Speed(row.median_s, row.facts["expected_s"], f"{row.size} on {device}, mesh {last.mesh}")
        for run, row in measured
        if run is last and row.median_s and row.facts.get("expected_s")
    ]
    if not speeds:
        return {"no_speed": f"{file} has a step on {device}, of which the plan says nothing"}
    return {"speed": max(speeds, key=lambda speed: speed.ratio)}


def _ops(arguments: argparse.Namespace) -> int:
    from comfy_tpu.porting.check import list_operators
    from comfy_tpu.porting.report import format_operators
    from comfy_tpu.porting.targets import find_targets

    given = {"config": _object(arguments, "config"), "inputs": _object(arguments, "inputs")}
    with _models_print_to_stderr():
        lists = [list_operators(target, **given) for target in find_targets(arguments.target)]
    found = sorted({each for operators, _ in lists for each in operators})
    ends = [end for _, end in lists if end is not None]
    if arguments.json:
        operators = [dataclasses.asdict(each) for each in found]
        print(json.dumps({"schema": 1, "operators": operators, "ends": ends}, indent=2))
    else:
        print(_printable(format_operators(found, ends)))
    return 1 if ends or any(each.by == "missing" for each in found) else 0


def _bisect(arguments: argparse.Namespace) -> int:
    from comfy_tpu.porting.bisect import bisect, format_json, format_text
    from comfy_tpu.porting.targets import find_targets

    given: dict[str, Any] = {"config": _object(arguments, "config"), "inputs": _object(arguments, "inputs")}
    chosen = {name: getattr(arguments, name) for name in ("checkpoint", "dtype", "tolerance")}
    targets = find_targets(arguments.target)
    if arguments.checkpoint is not None and len(targets) > 1:
        names = ", ".join(target.name for target in targets)
        raise InvalidValueError(
            f"checkpoint={arguments.checkpoint} is one model's, and TARGET has several ({names}); give one of them",
            field="checkpoint",
        )
    with _models_print_to_stderr():
        found = [bisect(target, **given, **chosen) for target in targets]
    print(format_json(found) if arguments.json else _printable(format_text(found)))
    return 1 if any(each.culprit for each in found) else 0


def _models_print_to_stderr() -> AbstractContextManager[object]:
    """What this command prints may be read by a program."""
    return contextlib.redirect_stdout(sys.stderr)


def _printable(text: str) -> str:
    return printable(text.split("\n"), sys.stdout.encoding or "ascii")


def _object(arguments: argparse.Namespace, name: str) -> dict[str, Any] | None:
    text = getattr(arguments, name)
    if text is None:
        return None
    try:
        content = parse_json(text)
    except ValueError as error:
        raise InvalidValueError(
            f"{name} is not JSON ({error}); quote it for the shell: '{{\"x\": [1, 16]}}'", field=name
        ) from None
    if not isinstance(content, dict):
        raise InvalidValueError(
            f"{name} is a {type(content).__name__}, expected an object: '{{\"x\": [1, 16]}}'", field=name
        )
    return content
