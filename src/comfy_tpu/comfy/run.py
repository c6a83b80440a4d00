"""Runs a node's pipeline, shows progress on the node, and stops when the user cancels."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import comfy.latent_formats
import comfy.model_management
import comfy.utils
import latent_preview
import torch
from comfy_execution.utils import get_executing_context

from comfy_tpu.comfy.models import open_pipeline
from comfy_tpu.comfy.node_text import NodeLine, NodeText, duration_text
from comfy_tpu.comfy.preview_loop import PreviewLoop
from comfy_tpu.comfy.routes import send_node_text, send_preview, send_status
from comfy_tpu.comfy.status import STATUS
from comfy_tpu.comfy.unloading import register_with_comfyui
from comfy_tpu.config import Lora, RunOptions, SingleFiles
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import NodeSet
from comfy_tpu.pipeline.progress import Progress, ignore_progress, model_title

if TYPE_CHECKING:
    from comfy_tpu.pipeline.preview_images import Previews
    from comfy_tpu.pipeline.video import VideoPipeline
    from comfy_tpu.remote.pipeline import RemotePipeline

    NodePipeline = VideoPipeline | RemotePipeline
    """What a node runs, here or on a server."""

logger = logging.getLogger(__name__)

_TEXT_SECONDS = 0.1
"""Seconds between two lines of text on a node; loading would otherwise send one for each tensor."""

Outcome = Literal["done", "cancelled", "failed"]

run_lock = threading.RLock()
"""Held during a run: ComfyUI runs one node at a time, but another thread may call a node."""


@contextlib.contextmanager
def pipeline_run(
    family: NodeSet,
    model_id: str | SingleFiles,
    stages: Mapping[str, int],
    options: RunOptions,
    loras: Sequence[Lora] = (),
) -> Iterator[VideoPipeline]:
    """The model's pipeline with these LoRAs and options, reporting to the current node. `stages`:
    the stages that its progress bar counts, with totals."""
    context = get_executing_context()
    report = NodeReport(context.node_id if context else None, stages, family)
    with run_lock, report.to_the_end():
        comfy.model_management.throw_exception_if_processing_interrupted()
        try:
            try:
                pipeline = open_pipeline(model_id, family, lambda: report(_opening(model_id)), options)
            except ModuleNotFoundError as error:
                raise UnsupportedError(
                    f"{error.name} is not installed in ComfyUI's Python; run `pip install -r requirements.txt` with it "
                    "in the pack's directory, or `comfy-tpu install`, which says what is missing"
                ) from error
            start()
            register_with_comfyui()
            pipeline.use_loras(loras, options.preset)
            report.use_previews(pipeline.previews)
            pipeline.on_progress = report
            try:
                yield pipeline
            finally:
                pipeline.on_progress = ignore_progress
        finally:
            report_idle()


def _opening(model_id: str | SingleFiles) -> Progress:
    return Progress("loading", str(model_id), 0, 0, model=model_title(str(model_id)))


def show_note(pipeline: NodePipeline, note: NodeText) -> None:
    """Shows a note on the current node."""
    if isinstance(pipeline.on_progress, NodeReport):
        pipeline.on_progress.notes.append(note)


@functools.cache
def start() -> None:
    """Lets the panel show devices: JAX is used from now on."""
    from comfy_tpu.compiler.residency import shared_residency

    STATUS.start()
    shared_residency().add_callback(
        lambda event: send_status(immediately=True)
    )  # a Free between two prompts, above all


def report_idle() -> None:
    """Reports that nothing is being computed."""
    STATUS.set_idle()
    send_status(immediately=True)


class NodeReport:
    """Shows progress on a node, and raises ComfyUI's exception if the user cancelled the run."""

    def __init__(
        self, node: str | None, stages: Mapping[str, int] | None = None, family: NodeSet | None = None
    ) -> None:
        self._node = node
        self._stages = stages or {}
        self._bar = comfy.utils.ProgressBar(sum(self._stages.values()), node_id=node)
        # Only where there is something to show: "taesd" reads a model from the disk for it, or warns that it has none.
        wanted = family.latent_format if family is not None and "denoising" in self._stages else ""
        known = getattr(comfy.latent_formats, wanted, None) if wanted else None  # an older ComfyUI may lack it
        self._previewer = latent_preview.get_previewer(torch.device("cpu"), known()) if known else None
        rate = family.latent_rate if family is not None else 1.0
        self._previews: PreviewLoop[Any] = PreviewLoop(lambda image: send_preview(node, image) if node else None, rate)
        self._shown: list[NodeLine] = []
        self._shown_at, self._begun = 0.0, time.monotonic()
        self.notes: list[NodeText] = []
        """Shown above every text: what the node does otherwise than its inputs say, and the model's own settings."""

    @contextlib.contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Shows at the end of the block how long it took, and whether it was cancelled or failed."""
        outcome: Outcome = "failed"
        try:
            yield
            outcome = "done"
        except comfy.model_management.InterruptProcessingException:
            outcome = "cancelled"
            raise
        finally:
            self._previews.close()
            self.show_end(outcome, time.monotonic() - self._begun)

    def show_end(self, outcome: Outcome, seconds: float) -> None:
        self._show([NodeText(f"node.{outcome}", {"time": duration_text(seconds)})], immediately=True)

    @property
    def shows_previews(self) -> bool:
        return self._previewer is not None

    def show_line(self, line: NodeLine) -> None:
        """Shows a line in place of the progress."""
        self._show(line, immediately=False)

    def use_previews(self, previews: Previews | None) -> None:
        """Shows latents as the pipeline does, where it can and previews are on."""
        if previews is not None and self._previewer is not None:
            from comfy_tpu.comfy.previews import PipelinePreviewer

            self._previewer = PipelinePreviewer(previews)

    def show_nothing(self) -> None:
        self._show([], immediately=True)

    def __call__(self, progress: Progress) -> None:
        # Raising here ends the run: that is how Cancel takes effect within a step.
        comfy.model_management.throw_exception_if_processing_interrupted()
        STATUS.record(progress, self._node)
        self._show(STATUS.line(), immediately=progress.stage != "loading" or progress.done in (0, progress.total))
        if progress.stage in self._stages:
            if progress.stage == "denoising" and progress.total != self._stages["denoising"]:  # a preset's steps
                self._stages = {**self._stages, "denoising": progress.total}
                self._bar.total = sum(self._stages.values())
            self._bar.update_absolute(self._bar_position(progress), preview=self._preview_image(progress))
        send_status(immediately=progress.done in (0, progress.total))

    def _bar_position(self, progress: Progress) -> int:
        """The position on the bar: the totals of the stages before, and the progress of this one."""
        names = list(self._stages)
        before = sum(self._stages[name] for name in names[: names.index(progress.stage)])
        # In proportion: a video that is continued has more steps than its widget says.
        return before + round(self._stages[progress.stage] * progress.done / max(progress.total, 1))

    def _preview_image(self, progress: Progress) -> object:
        if self._previewer is None or progress.preview is None:
            return None
        from comfy_tpu.comfy.previews import preview_frames

        images = preview_frames(self._previewer, progress.preview())
        return self._previews.replace(images) if images else None

    def _show(self, line: NodeLine, *, immediately: bool) -> None:
        now = time.monotonic()
        lines = [*([note] for note in self.notes), line]
        if self._node is None or lines == self._shown or (not immediately and now - self._shown_at < _TEXT_SECONDS):
            return
        self._shown, self._shown_at = lines, now
        send_node_text(self._node, lines)
