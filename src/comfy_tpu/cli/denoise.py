"""comfy-tpu denoise: the second stage. Settings come from the text's file; options given here take precedence."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from comfy_tpu.cli import options
from comfy_tpu.cli.hosts import add_hosts
from comfy_tpu.config import GenerationSettings, SecondPass
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.parallel.hosts import is_first_host

if TYPE_CHECKING:
    from comfy_tpu.families.card import ModelCard
    from comfy_tpu.pipeline.artifacts import Header

OUTPUT = "latents.safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", type=options.path_parser("TEXT"), help="what `comfy-tpu encode` made")
    options.add_artifact_output(parser, f"{OUTPUT} beside TEXT")
    parser.add_argument(
        "--latents",
        type=options.path_parser("--latents"),
        metavar="FILE",
        help="latents to start from, such as those that `comfy-tpu upscale` made, with --strength",
    )
    parser.add_argument(
        "--strength",
        type=options.number_parser(float),
        metavar="X",
        help=f"share of the steps that are run from --latents, above 0 and up to 1 ({SecondPass(0.0).strength:g})",
    )
    options.add_force(parser)
    options.add_checkpoint(parser)
    options.add_preview(parser)
    options.add_report(parser)
    options.add_settings(parser, without=options.TEXT_SETTINGS, from_input="TEXT")
    options.add_model(parser, default=None)
    options.add_tiny_vae(parser)
    options.add_attention(parser)
    options.add_loras(parser)
    options.add_debugging(parser)
    add_hosts(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.pipeline import artifacts, second_pass

    header = artifacts.read_header(arguments.text, "text")
    output = arguments.output or arguments.text.with_name(OUTPUT)
    there = sessions.read_existing_artifact(output, "latents", arguments)
    start = _read_start(arguments)
    with sessions.open_next_stage(arguments, arguments.text, header) as session:
        session.check_outputs(output)
        embeddings, header = artifacts.load_text(arguments.text, session.pipeline)
        settings = session.settings(header.settings if start is None else _resize(header.settings, start))
        if start is not None:
            _check_fps(session.pipeline.card, settings, start)
            begun, _ = artifacts.load_latents(arguments.latents, session.pipeline)
            strength = SecondPass(0.0).strength if arguments.strength is None else arguments.strength
            embeddings = second_pass.start_from(embeddings, begun, strength)
            session.second_pass = second_pass.describe_start(begun, strength)
        artifacts.check_guidance(arguments.text, embeddings, settings, session.pipeline.family.card)
        session.images_fingerprint = header.images_fingerprint
        if start is None:
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


def _read_start(arguments: argparse.Namespace) -> Header | None:
    """The header of the latents to start from; None: denoising starts as TEXT says."""
    from comfy_tpu.pipeline import artifacts

    if arguments.latents is not None:
        return artifacts.read_header(arguments.latents, "latents")
    if arguments.strength is not None:
        raise InvalidValueError(
            f"strength={arguments.strength} is for latents to start from; give --latents, or give it to `encode`",
            field="strength",
        )
    return None


def _check_fps(card: ModelCard, settings: GenerationSettings, start: Header) -> None:
    if card.sound is not None and settings.fps != start.settings.fps:
        raise InvalidValueError(
            f"fps={settings.fps} is not that of the latents, {start.settings.fps}, whose sound is as long as their "
            "frames; leave it out",
            field="fps",
        )


def _resize(settings: GenerationSettings, start: Header) -> GenerationSettings:
    """The settings of the text with the sizes of the latents."""
    names = ("height", "width", "num_frames", "num_videos", "fps")
    return dataclasses.replace(settings, **{name: getattr(start.settings, name) for name in names})
