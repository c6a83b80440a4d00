"""Fills the compile cache ahead of a request, so that the first one in any later process finds all its programs.

Every program of the request runs once, on blank weights: the code is that of a real run, so that what it compiles is
what a real run looks for.
"""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.config import GenerationSettings
from comfy_tpu.pipeline.denoise import denoise_steps
from comfy_tpu.pipeline.init_image import InitImage
from comfy_tpu.pipeline.step_plan import Plan
from comfy_tpu.pipeline.video import VideoPipeline


def warm_request(
    pipeline: VideoPipeline,
    settings: GenerationSettings,
    images: Sequence[Image.Image] = (),
    init_image: InitImage | None = None,
) -> None:
    """Runs each program of a request once. `pipeline` was opened with blank weights."""
    plan = pipeline.plan(settings, 1.0 if init_image is None else init_image.strength)
    given = images or _required_images(pipeline, settings)
    embeddings = pipeline.encode("a video", settings, given)
    pipeline.running.place_steps(pipeline.choose_placement(settings))
    for samples, _ in denoise_steps(pipeline.running, _one_of_each(plan), embeddings, settings, init_image):
        latents = samples[0]
    made = to_host(latents)
    pipeline.decode_sound(made, settings)
    for _ in pipeline.decode(made, settings):
        pass


def _required_images(pipeline: VideoPipeline, settings: GenerationSettings) -> Sequence[Image.Image]:
    takes = pipeline.family.card.image
    if takes is None or not takes.required:
        return ()
    blank = Image.new("RGB", (settings.width, settings.height))
    return (blank, blank) if takes.last_image == "required" else (blank,)


def _one_of_each(plan: Plan) -> Plan:
    """The first step of each program, in the plan's order."""
    first = {(step.transformer, step.guided, step.reused): step for step in reversed(plan.steps)}
    return Plan(tuple(step for step in plan.steps if step is first[step.transformer, step.guided, step.reused]))
