"""comfy-tpu port new: a family for a pipeline of diffusers, from its class or a model directory.

Exits with 0 if the family is written and its parity test passes, or with --no-test or --dry-run if nothing of the
pipeline was left unexplained; with 1 otherwise. The keys of --json are described in
src/comfy_tpu/porting/scaffold/report.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy_tpu
from comfy_tpu.cli.findings import printable
from comfy_tpu.cli.streams import write_error
from comfy_tpu.distribution import pip_command
from comfy_tpu.errors import GUIDE
from comfy_tpu.terminal_text import sanitize

if TYPE_CHECKING:
    from comfy_tpu.porting.scaffold.new import Scaffold

_FIRST_FRAME = "single] PASSED"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the family: small letters, digits and _")
    parser.add_argument(
        "--from",
        dest="model",
        metavar="MODEL",
        required=True,
        help="a pipeline class of diffusers, or a model directory, of which the JSON files do",
    )
    parser.add_argument(
        "--model-id", metavar="ID", help="the model on the hub; default: that of the pipeline's example"
    )
    parser.add_argument("--into", metavar="DIR", help="another checkout of comfy-tpu than this command's")
    parser.add_argument(
        "--pack", metavar="DIR", help="write an independent pack ComfyUI-<Model>-TPU into this new directory instead"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--no-test", action="store_true", help="do not run the parity test that was written")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    begin = time.perf_counter()
    from comfy_tpu.porting.scaffold.files import undo_command, write
    from comfy_tpu.porting.scaffold.new import make_scaffold
    from comfy_tpu.porting.scaffold.report import format_lines, make_document

    def tell(text: str) -> None:
        write_error(sanitize(f"[{time.perf_counter() - begin:5.1f} s] {text}"))

    scaffold = make_scaffold(
        arguments.name,
        arguments.model,
        into=arguments.into,
        pack=arguments.pack,
        model_id=arguments.model_id,
        writes=not arguments.dry_run,
        tell=tell,
    )
    if not arguments.json:
        _print(format_lines(scaffold))
    if scaffold.blocked:
        return _blocked(scaffold, arguments)
    left = scaffold.facts.calls.unexplained
    outcome: dict[str, Any] = {"tested": None, "seconds_to_a_frame": None, "undo": None}
    if not arguments.dry_run:
        root = scaffold.destination.root
        outcome["undo"] = undo_command(root, scaffold.files, scaffold.facts.name)
        write(root, scaffold.files)
        if not arguments.no_test and not left and importlib.util.find_spec("pytest") is not None:
            tell(f"running {scaffold.destination.test[0]}")
            try:
                outcome |= _test(scaffold, begin, quiet=arguments.json)
            except BaseException:  # Ctrl-C and other signals: they go on from here
                write_error(sanitize("\n".join(_kept(scaffold, outcome["undo"]))))
                raise
    if arguments.json:
        print(json.dumps({**make_document(scaffold), **outcome}, indent=2))
    else:
        _print(_ending(scaffold, outcome, arguments))
    return 1 if left or outcome["tested"] is False else 0


def _blocked(scaffold: Scaffold, arguments: argparse.Namespace) -> int:
    from comfy_tpu.porting.report import format_text
    from comfy_tpu.porting.scaffold.report import make_document

    if arguments.json:
        print(
            json.dumps({**make_document(scaffold), "tested": None, "seconds_to_a_frame": None, "undo": None}, indent=2)
        )
    else:
        _print(["", *format_text(check for check in scaffold.checks if check.blocked).split("\n")])
        _print(["", "Nothing was written: a family of a model that does not run would not run either."])
    return 1


def _test(scaffold: Scaffold, begin: float, *, quiet: bool) -> dict[str, Any]:
    """Line by line, for the moment at which the first frame was there."""
    destination = scaffold.destination
    root = destination.root
    options = ("-v", "--no-header", "--tb=short", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *destination.test]
    # Behind it what this process imports comfy_tpu from: a pack has none of its own.
    places = [*(str(root / place) for place in destination.source_path), str(Path(comfy_tpu.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*places, os.environ.get("PYTHONPATH", "")))}
    frame = None
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if frame is None and _FIRST_FRAME in line:
                    frame = round(time.perf_counter() - begin, 1)
                if not quiet:
                    _print([line.rstrip("\n")])
        except BaseException:
            process.terminate()  # a signal to this process alone would leave it running
            raise
    return {"tested": process.returncode == 0, "seconds_to_a_frame": frame}


def _kept(scaffold: Scaffold, undo: str) -> list[str]:
    """For a test that did not pass, or did not end."""
    root, test = scaffold.destination.root, shlex.join([sys.executable, "-m", "pytest", *scaffold.destination.test])
    again = f"cd {shlex.quote(str(root))} && {test}"
    return [
        f"The {len(scaffold.files)} files of {scaffold.facts.name} are written, and stay. Test again: {again}",
        f"Remove all of it: {undo}",
    ]


def _ending(scaffold: Scaffold, outcome: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    would = "would be written" if arguments.dry_run else "written"
    lines = [
        "",
        f"{len(scaffold.files)} files {would} in {scaffold.destination.root}:",
        *(f"  {name}" for name in scaffold.files),
    ]
    if arguments.dry_run:
        return lines
    lines.append("")
    if outcome["seconds_to_a_frame"] is not None:
        lines.append(
            f"{outcome['seconds_to_a_frame']} s from this command's start to a decoded {scaffold.facts.noun} that is "
            "diffusers' own, on a small random model."
        )
    if outcome["tested"] is False:
        lines += [f"The parity test fails: see above, and {GUIDE}.", *_kept(scaffold, outcome["undo"])]
    elif left := scaffold.facts.calls.unexplained:
        where, test = scaffold.destination.package_directory, shlex.join(scaffold.destination.test)
        lines += ["What remains is to be written by hand, where the family says `unexplained`, then tested:"]
        lines += [f"  {sentence}" for sentence in left] + [f"  edit {where}; python -m pytest {test}"]
    else:
        if outcome["tested"] is None and not arguments.no_test:
            lines.append(f"The parity test has not run: {pip_command('install', 'pytest')}, then python -m pytest")
        lines += _next(scaffold)
    return lines


def _next(scaffold: Scaffold) -> list[str]:
    model = scaffold.facts.model_id
    if scaffold.facts.source.directory is not None:
        plan = f"comfy-tpu plan {model} --tpu v6e-8"
    else:  # the class's defaults need not be what was published
        plan = "comfy-tpu plan DIR --tpu v6e-8   # DIR: the model's JSON files; a class does not say what was published"
    return [
        f"Next, {GUIDE}:",
        *(f"  {step}" for step in scaffold.destination.next_steps(scaffold.facts)),
        f"  {plan}",
        f'  comfy-tpu generate "a purple star" --model {model}   # downloads the weights',
    ]


def _print(lines: list[str]) -> None:
    print(printable(lines, sys.stdout.encoding or "ascii"), flush=True)
