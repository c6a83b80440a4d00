"""comfy-tpu calibrate: runs a few prompts and writes reuse.json, by which --reuse chooses the steps to leave out."""

from __future__ import annotations

import argparse
from pathlib import Path

from comfy_tpu.cli import options

FIXED = ("num_videos", "fps", "reuse", "guidance_until")
"""Settings that a calibration does not have: it computes every step of one video at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory, a hub id, or demo")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="once or more (three of its own)")
    parser.add_argument("-o", "--output", type=Path, metavar="PATH", help="x.json (default: reuse.json in the model)")
    options.add_settings(parser, without=FIXED)
    options.add_machine(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.pipeline import atomic, calibration, reuse

    prompts = arguments.prompt or calibration.PROMPTS
    with sessions.open_session(arguments, arguments.model) as session:
        output = arguments.output or session.pipeline.directory / reuse.FILE
        atomic.check_place(output)
        session.check_outputs(output)
        settings = session.settings()
        curve = calibration.measure_curve(session.pipeline, prompts, settings)
        calibration.save(output, curve, session.pipeline, prompts, settings)
    print(output)
    return 0
