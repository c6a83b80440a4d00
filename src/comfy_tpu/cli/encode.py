"""comfy-tpu encode: the first stage. Writes the embeddings of a prompt to a file, with all settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from comfy_tpu.cli import options
from comfy_tpu.cli.hosts import add_hosts
from comfy_tpu.parallel.hosts import is_first_host

OUTPUT = "text.safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_prompt(parser)
    options.add_images(parser)
    options.add_videos(parser)
    options.add_strength(parser)
    options.add_artifact_output(parser, OUTPUT)
    options.add_force(parser)
    options.add_report(parser)
    options.add_settings(parser)
    options.add_model(parser, default="demo")
    options.add_vae_backend(parser)
    options.add_debugging(parser)
    add_hosts(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.pipeline import artifacts

    prompt = options.read_prompt(arguments)
    given = options.read_media(arguments)
    output = arguments.output or Path(OUTPUT)
    there = sessions.read_existing_artifact(output, "text", arguments)
    with sessions.open_session(arguments, options.chosen_model(arguments), given=given) as session:
        session.check_outputs(output)
        session.quantization = session.loras = ""  # of the transformer, which embeddings do not depend on
        settings = session.settings(given=given)
        session.set_media(given)
        if session.is_up_to_date(output, prompt, settings, there):
            return session.report([output], prompt, settings, cut=there.get("cut", ""), skipped=True)
        embeddings = session.pipeline.encode(prompt, settings, given)
        sessions.warn_of_cut(embeddings.cut)
        if is_first_host():
            artifacts.save_text(output, embeddings, settings, session.pipeline, preset=session.made_from["preset"])
    return session.report([output], prompt, settings, cut=embeddings.cut)
