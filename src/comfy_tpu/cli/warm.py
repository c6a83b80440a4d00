"""comfy-tpu warm: compiles the programs of a model and a size ahead, without reading its weights."""

from __future__ import annotations

import argparse

from comfy_tpu.cli import options
from comfy_tpu.cli.terminal import print_text
from comfy_tpu.errors import InvalidValueError

WITHOUT = ("fps", "seed", "negative_prompt")
"""Settings that no program depends on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory, a hub id, demo or demo-image")
    options.add_images(parser)
    options.add_videos(parser)
    options.add_strength(parser)
    options.add_settings(parser, without=WITHOUT)
    options.add_machine(parser)
    options.add_vae_backend(parser)
    options.add_attention(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.compiler.cache import cache_directory
    from comfy_tpu.compiler.stored.entries import format_bytes, list_files
    from comfy_tpu.pipeline.warming import warm_request

    given = options.read_media(arguments)
    with sessions.open_session(arguments, arguments.model, blank=True) as session:
        settings = session.settings(given=given)
        session.set_media(given)
        warm_request(session.pipeline, settings, given)
    directory = cache_directory(session.pipeline.running.runtime.cache)
    programs = session.display.account.programs
    compiled = [program for program in programs if not program.from_cache]
    total = sum(info.nbytes for info in list_files(directory))
    if not total:
        raise InvalidValueError(
            f"{len(programs)} programs were compiled and none is kept: {directory} cannot be written, or its limit is "
            "smaller than a program; choose another --cache-dir, or a larger COMFY_TPU_CACHE_LIMIT"
        )
    store = session.pipeline.running.store
    needed, kept = (0, 0) if store is None else store.count_programs()
    if kept < needed:
        raise InvalidValueError(
            f"{kept} of {needed} programs, with those that load weights, are kept: {directory} cannot be written, all "
            "of them are larger than its limit, or comfy-tpu or a library was changed meanwhile; choose another "
            "--cache-dir or a larger COMFY_TPU_CACHE_LIMIT, or run it again"
        )
    print_text(f"{len(programs)} programs, {len(compiled)} of them compiled now; {directory} has {format_bytes(total)}")
    return 0
