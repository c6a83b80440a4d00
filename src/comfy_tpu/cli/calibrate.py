"""comfy-tpu calibrate: runs a few prompts and writes reuse.json, by which --reuse chooses the steps to leave out."""

from __future__ import annotations

import argparse

from comfy_tpu.cli import options
from comfy_tpu.cli.terminal import print_paths

FIXED = ("num_videos", "fps", "reuse", "guidance_until", "fast", "preset", "sigmas", *options.CONTEXT_SETTINGS)
"""Settings that cannot be chosen: a calibration computes every step of one whole video at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory, a hub id, demo or demo-image")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="may be repeated (default: three prompts of its own)"
    )
    options.add_images(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=options.path_parser("--output"),
        metavar="PATH",
        help="x.json (default: reuse.json in the model)",
    )
    options.add_settings(parser, without=FIXED)
    options.add_machine(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.pipeline import atomic, calibration, reuse

    prompts = arguments.prompt or calibration.PROMPTS
    for prompt in prompts:
        options.check_texts(prompt, arguments.negative_prompt)
    images = options.read_images(arguments)
    with sessions.open_session(arguments, arguments.model) as session:
        output = arguments.output or session.pipeline.directory / reuse.CURVE_FILE
        atomic.check_place(output)
        session.check_outputs(output)
        settings = session.settings()
        session.set_images(images)
        curve = calibration.measure_curve(session.pipeline, prompts, settings, images)
        calibration.save_measured_curve(
            output, curve, session.pipeline, prompts, settings, images_fingerprint=session.images_fingerprint
        )
    print_paths([output])
    return 0
