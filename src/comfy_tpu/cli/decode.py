"""comfy-tpu decode: the last stage, from latents to a video."""

from __future__ import annotations

import argparse

from comfy_tpu.cli import options
from comfy_tpu.cli.hosts import add_hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "latents", metavar="LATENTS", type=options.path_parser("LATENTS"), help="what `comfy-tpu denoise` made"
    )
    options.add_video_output(parser, "LATENTS with .mp4 for its suffix, .png for an image")
    options.add_fps(parser)
    options.add_force(parser)
    options.add_interpolation(parser)
    options.add_report(parser)
    options.add_model(parser, default=None)
    options.add_vae_backend(parser)
    options.add_debugging(parser)
    add_hosts(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.pipeline import artifacts

    header = artifacts.read_header(arguments.latents, "latents")
    more_frames = sessions.read_interpolation(arguments)
    sessions.check_video_output(arguments, header.settings.num_videos)
    with sessions.open_next_stage(arguments, arguments.latents, header) as session:
        latents, header = artifacts.load_latents(arguments.latents, session.pipeline)
        session.loras, session.images_fingerprint = header.loras, header.images_fingerprint
        session.attention_window, session.quantization = header.attention_window, header.quantization
        session.second_pass = header.second_pass
        settings = session.settings(header.settings)
        session.set_interpolation(settings, more_frames)
        own = arguments.latents.with_suffix(".png" if session.makes_images else ".mp4")
        paths = session.choose_outputs(lambda: own, settings)
        there = session.are_videos_up_to_date(paths, header.prompt, settings)
        if not there:
            session.write_videos(latents, header.prompt, settings, paths)
    return session.report(paths, header.prompt, settings, cut=header.cut, skipped=there)
