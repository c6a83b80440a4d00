"""Ends runs of nodes in every way over the stand-in for ComfyUI; prints what nodes showed, as one JSON object.

python tests/comfy_pack/run_reports.py
"""

import contextlib
import json
import logging
import sys
import threading
import types
from pathlib import Path

import fake_comfyui  # beside this file
import torch

from comfy_tpu.comfy.node_text import join_line
from comfy_tpu.config import RunOptions
from comfy_tpu.errors import DeviceMemoryError, TraceError
from comfy_tpu.families.wan.card import CARD
from comfy_tpu.pipeline.progress import Progress, ignore_progress


class InterruptProcessingException(Exception):  # noqa: N818 - ComfyUI's name
    pass


class OutOfMemory(Exception):  # noqa: N818
    pass


class Bar:
    def __init__(self, total, node_id=None):
        pass

    def update_absolute(self, value, preview=None):
        pass


def raise_error(error):
    if error is not None:
        raise error


def run_family(run, error, *, opens=True):
    """Texts of a sampler that reports the first step, and then fails with `error`."""
    shown = []
    run.send_node_text = lambda node, lines: shown.append("\n".join(map(join_line, lines)))
    pipeline = types.SimpleNamespace(use_loras=lambda loras, preset: None, previews=None, on_progress=ignore_progress)
    run.open_pipeline = lambda *given: pipeline if opens else raise_error(error)
    with contextlib.suppress(Exception), run.pipeline_run(CARD.node_sets[0], "demo", {"denoising": 4}, RunOptions()):
        pipeline.on_progress(Progress("denoising", "", 0, 4, size="64×64×17"))
        raise_error(error)
    return {"texts": shown, "stage": run.STATUS.snapshot()["activity"]["stage"]}


class Colours:
    """A previewer of the kind that colours latents."""

    def __init__(self, channels: int = 1, reshape=None) -> None:
        self.latent_rgb_factors = torch.zeros(3, channels)
        self.latent_rgb_factors_reshape = reshape

    def decode_latent_to_preview_image(self, kind, latents):
        return [kind, list(latents.shape), int(latents[0, 0, 0, 0, 0])]


class Network:
    """Any other previewer."""

    decode_latent_to_preview_image = Colours.decode_latent_to_preview_image


def run_previews(run, previewer):
    """The images that a step of a video with three latent frames shows: with the bar, and until the next."""
    shown, sent, complete = [], [], threading.Event()

    def send_preview(node, image):
        sent.append([node, image])
        if len(sent) == 3:
            complete.set()

    run.send_preview = send_preview
    run.send_node_text = lambda node, lines: None
    run.comfy.latent_formats.Wan21 = object
    run.latent_preview.Latent2RGBPreviewer = Colours
    run.latent_preview.get_previewer = lambda device, latent_format: previewer
    run.comfy.utils.ProgressBar.update_absolute = lambda self, value, preview=None: shown.append(preview)
    latents = torch.arange(3.0).view(1, 1, 3, 1, 1)
    report = run.NodeReport("7", {"denoising": 4}, CARD.node_sets[0])
    with report.to_the_end():
        report(Progress("denoising", "", 1, 4, size="64×64×9", preview=lambda: latents))
        complete.wait(60 if shown[0] is not None and type(previewer) is Colours else 0.5)
    return {"bar": shown, "sent": sent[:3]}


def run_native(run, hosting, error):
    """Texts of a text encoder of ComfyUI's that compiles, and then fails with `error`."""
    shown = []
    run.send_node_text = lambda node, lines: shown.append("\n".join(map(join_line, lines)))
    host = hosting.Host.__new__(hosting.Host)
    host._run = host._report = host._check = None
    host._is_checked = False

    def compile_and_fail(*given, meanwhile, is_checked):
        host._report_progress(Progress("compiling", "t5", 0, 1, size="512 tokens", compiles=True))
        raise error

    host._hosted = compile_and_fail
    try:
        host(None)
    except Exception as met:  # noqa: BLE001 - each is a case of the test
        kind = type(met).__name__
    return {"texts": shown, "raised": kind, "stage": run.STATUS.snapshot()["activity"]["stage"]}


def run():
    from comfy_tpu.comfy import run  # which imports ComfyUI
    from comfy_tpu.comfy.native import hosting

    management = run.comfy.model_management
    management.InterruptProcessingException = InterruptProcessingException
    management.OOM_EXCEPTION = OutOfMemory
    management.throw_exception_if_processing_interrupted = lambda: None
    run.comfy.utils.ProgressBar = Bar
    run.comfy.latent_formats.Wan21 = None
    run.get_executing_context = hosting.get_executing_context = lambda: types.SimpleNamespace(
        node_id="7", prompt_id="p"
    )
    run.send_status = lambda **options: None
    run.start = hosting.start = lambda: None
    run.register_with_comfyui = hosting.register_with_comfyui = lambda: None
    cancelled, wrong = InterruptProcessingException(), RuntimeError("x")
    return {
        "family": {
            "done": run_family(run, None),
            "cancelled": run_family(run, cancelled),
            "failed": run_family(run, wrong),
            "not opened": run_family(run, wrong, opens=False),
        },
        "native": {
            "cancelled": run_native(run, hosting, cancelled),
            "failed": run_native(run, hosting, wrong),
            "out of memory": run_native(run, hosting, DeviceMemoryError("x")),
            "on the host": run_native(run, hosting, TraceError("x")),
        },
        "previews": {
            "colours": run_previews(run, Colours()),
            "other channels": run_previews(run, Colours(channels=4)),
            "reshaped": run_previews(run, Colours(reshape=lambda latents: latents[:, :1])),
            "not to be reshaped": run_previews(run, Colours(reshape=lambda latents: latents.view(1, 32, -1))),
            "network": run_previews(run, Network()),
        },
    }


if __name__ == "__main__":
    logging.disable()
    fake_comfyui.install(Path.cwd())
    sys.stdout.write(json.dumps(run()) + "\n")
