"""comfy-tpu denoise: the second stage. Settings come from the text's file; options given here take precedence."""

from __future__ import annotations

import argparse

from comfy_tpu.cli import options
from comfy_tpu.cli.hosts import add_hosts
from comfy_tpu.parallel.hosts import is_first_host

OUTPUT = "latents.safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", type=options.path_parser("TEXT"), help="what `comfy-tpu encode` made")
    options.add_artifact_output(parser, f"{OUTPUT} beside TEXT")
    options.add_force(parser)
    options.add_checkpoint(parser)
    options.add_report(parser)
    options.add_settings(parser, without=options.TEXT_SETTINGS, from_input="TEXT")
    options.add_model(parser, default=None)
    options.add_attention(parser)
    options.add_loras(parser)
    options.add_debugging(parser)
    add_hosts(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.pipeline import artifacts

    header = artifacts.read_header(arguments.text, "text")
    output = arguments.output or arguments.text.with_name(OUTPUT)
    there = sessions.read_existing_artifact(output, "latents", arguments)
    with sessions.open_next_stage(arguments, arguments.text, header) as session:
        session.check_outputs(output)
        embeddings, header = artifacts.load_text(arguments.text, session.pipeline)
        settings = session.settings(header.settings)
        artifacts.check_guidance(arguments.text, embeddings, settings, session.pipeline.family.card)
        session.images_fingerprint = header.images_fingerprint
        artifacts.check_seed(arguments.text, embeddings, header.settings, settings, session.pipeline.family.card)
        skipped = session.is_up_to_date(output, header.prompt, settings, there)
        checkpoint = session.open_checkpoint([output])
        if not skipped:
            latents = session.pipeline.denoise(embeddings, settings, checkpoint=checkpoint)
        if not skipped and is_first_host():
            artifacts.save_latents(
                output,
                latents,
                header.prompt,
                settings,
                session.pipeline,
                cut=header.cut,
                **session.made_from,
            )
        session.remove_checkpoint()
    return session.report([output], header.prompt, settings, cut=header.cut, skipped=skipped)
