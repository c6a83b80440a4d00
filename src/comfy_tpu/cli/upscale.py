"""comfy-tpu upscale: larger latents for a second pass, from those of a first one."""

from __future__ import annotations

import argparse

from comfy_tpu.cli import options
from comfy_tpu.cli.hosts import add_hosts
from comfy_tpu.config import SecondPass
from comfy_tpu.parallel.hosts import is_first_host

OUTPUT = "upscaled.safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "latents", metavar="LATENTS", type=options.path_parser("LATENTS"), help="what `comfy-tpu denoise` made"
    )
    options.add_upscale(parser, "--scale", "--by", required=True)
    options.add_artifact_output(parser, f"{OUTPUT} beside LATENTS")
    options.add_force(parser)
    options.add_report(parser)
    options.add_model(parser, default=None)
    options.add_vae_backend(parser)
    options.add_debugging(parser)
    add_hosts(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.pipeline import artifacts, second_pass

    header = artifacts.read_header(arguments.latents, "latents")
    output = arguments.output or arguments.latents.with_name(OUTPUT)
    there = sessions.read_existing_artifact(output, "latents", arguments)
    by = SecondPass(0.0).by if arguments.upscale_by is None else arguments.upscale_by
    with sessions.open_next_stage(arguments, arguments.latents, header) as session:
        session.check_outputs(output)
        pipeline, first = session.pipeline, header.settings
        latents, header = artifacts.load_latents(arguments.latents, pipeline)
        larger = second_pass.upscaled_settings(pipeline.family.card, pipeline.model_name, first, arguments.upscale, by)
        session.loras, session.images_fingerprint = header.loras, header.images_fingerprint
        session.attention_window, session.quantization = header.attention_window, header.quantization
        session.second_pass = second_pass.describe_upscaling(latents, arguments.upscale, by)
        skipped = session.is_up_to_date(output, header.prompt, larger, there)
        if not skipped:
            made = second_pass.upscale_latents(pipeline, latents, first, larger, by)
        if not skipped and is_first_host():
            artifacts.save_latents(output, made, header.prompt, larger, pipeline, cut=header.cut, **session.made_from)
    return session.report([output], header.prompt, larger, cut=header.cut, skipped=skipped)
