"""Fills the compile cache ahead of a request, so that the first one in any later process finds all its programs.

Every program of the request runs once, on blank weights: the code is that of a real run, so that what it compiles is
what a real run looks for.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.context import window_settings
from comfy_tpu.pipeline.denoise import denoise_steps
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia
from comfy_tpu.pipeline.initial import read_strength
from comfy_tpu.pipeline.media_segments import encode_segment
from comfy_tpu.pipeline.step_plan import Plan
from comfy_tpu.pipeline.video import VideoPipeline
from comfy_tpu.pipeline.video_files import Frames


def warm_request(
    pipeline: VideoPipeline,
    settings: GenerationSettings,
    given: GivenMedia = NO_MEDIA,
) -> None:
    """Runs each program of a request once. `pipeline` was opened with blank weights."""
    embeddings = pipeline.encode("a video", settings, given or blank_media(pipeline.family.card, settings))
    plan = pipeline.plan(settings, read_strength(embeddings.shared))
    pipeline.running.place_steps(pipeline.choose_placement(settings))
    card = pipeline.family.card
    if card.makes_segments:  # the first of them has the programs of all
        embeddings = encode_segment(pipeline.running, embeddings, 0, None, settings)
        settings = window_settings(settings)
    plan = _one_of_each(plan)
    if settings.context_keyframes:  # the same steps with keyframes, and without
        plan = Plan(plan.steps * 2)
        settings = dataclasses.replace(settings, context_keyframes=0.5)
    for samples, _ in denoise_steps(pipeline.running, plan, embeddings, settings):
        latents = samples[0]
    made = to_host(latents)[:, :, -card.latent_size(settings)[0] :]
    pipeline.decode_sound(made, settings)
    for _ in pipeline.decode(made, settings):
        pass


def blank_media(card: ModelCard, settings: GenerationSettings) -> GivenMedia:
    """Black images and videos, as far as the model needs some."""
    takes, images = card.image, tuple[Image.Image, ...]()
    if takes is not None and takes.required:
        blank = Image.new("RGB", (settings.width, settings.height))
        images = (blank, blank) if takes.last_image == "required" else (blank,)
    black = Frames(np.zeros((settings.num_frames, settings.height, settings.width, 3), np.uint8))
    return GivenMedia(images, videos={video.name: black for video in card.videos if video.required})


def _one_of_each(plan: Plan) -> Plan:
    """The first step of each program, in the plan's order."""
    first = {(step.transformer, step.guided, step.reused): step for step in reversed(plan.steps)}
    return Plan(tuple(step for step in plan.steps if step is first[step.transformer, step.guided, step.reused]))
