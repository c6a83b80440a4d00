"""comfy-tpu generate: makes a video, or an image with an image model, from a prompt."""

from __future__ import annotations

import argparse

from comfy_tpu.cli import options
from comfy_tpu.cli.device_start import start_devices
from comfy_tpu.cli.hosts import add_hosts
from comfy_tpu.config import SECOND_PASS

VIDEO_OUTPUT = "video.mp4"
IMAGE_OUTPUT = "image.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_prompt(parser)
    options.add_images(parser)
    options.add_videos(parser)
    options.add_strength(parser)
    options.add_video_output(
        parser, f"{VIDEO_OUTPUT} or {IMAGE_OUTPUT}; {VIDEO_OUTPUT.replace('.', '-1.')} and so on if it is taken"
    )
    options.add_checkpoint(parser)
    options.add_preview(parser)
    options.add_interpolation(parser)
    options.add_report(parser)
    options.add_settings(parser)
    options.add_second_pass(parser)
    options.add_model(parser, default="demo")
    options.add_vae_backend(parser)
    options.add_attention(parser)
    options.add_loras(parser)
    options.add_debugging(parser)
    add_hosts(parser)


def run(arguments: argparse.Namespace) -> int:
    prompt = options.read_prompt(arguments)
    given = options.read_media(arguments)
    start_devices(arguments.platform)
    from comfy_tpu.cli import session as sessions
    from comfy_tpu.pipeline import media, second_pass

    sessions.check_video_output(arguments, arguments.num_videos or 1)
    second = second_pass.read_second_pass(vars(arguments))
    more_frames = sessions.read_interpolation(arguments)
    with sessions.open_session(arguments, options.chosen_model(arguments), given=given) as session:
        settings = session.settings(given=given)
        session.set_media(given)
        session.set_second_pass(settings, second, given)
        session.set_interpolation(settings, more_frames)
        own = IMAGE_OUTPUT if session.makes_images else VIDEO_OUTPUT
        paths = session.choose_outputs(lambda: media.free_output(own, settings.num_videos), settings)
        checkpoint = session.open_checkpoint(paths)
        embeddings = session.pipeline.encode(prompt, settings, given)
        session.set_strength(embeddings)
        sessions.warn_of_cut(embeddings.cut)
        latents = session.pipeline.denoise(embeddings, settings, checkpoint=checkpoint)
        if second is not None:
            latents, settings = second_pass.denoise_again(
                session.pipeline,
                embeddings,
                latents,
                settings,
                second,
                given,
                session.open_checkpoint(paths, SECOND_PASS),
            )
        session.write_videos(latents, prompt, settings, paths)
        session.remove_checkpoint()
    return session.report(paths, prompt, settings, cut=embeddings.cut)
