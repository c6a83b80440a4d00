"""Answers in the form of OpenAI's API."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES
from comfy_tpu.jobs.ledger import State
from comfy_tpu.jobs.served_ledger import Record
from comfy_tpu.pipeline.second_pass import read_second_pass
from comfy_tpu.serving.job_progress import JobProgress
from comfy_tpu.serving.served_model import ServedModel
from comfy_tpu.serving.shapes import Sizes

STATUS: dict[State, str] = {
    "submitted": "queued",
    "leased": "queued",
    "running": "in_progress",
    "done": "completed",
    "failed": "failed",
    "cancelled": "failed",  # a word that clients of OpenAI's know
}


def describe_video(
    record: Record,
    model: ServedModel | None,
    progress: JobProgress,
    expires_after: float,
    hide_paths: Callable[[str], str],
) -> dict[str, Any]:
    values = record.request.values
    defaults = GenerationSettings() if model is None else model.defaults
    chosen = values if model is None else model.chosen_settings(values)
    width, height = chosen.get("width", defaults.width), chosen.get("height", defaults.height)
    frames, fps = chosen.get("num_frames", defaults.num_frames), chosen.get("fps", defaults.fps)
    finished, second = record.finished_at, read_second_pass(values)
    answer: dict[str, Any] = {
        "id": record.id,
        "object": record.kind,
        "model": record.request.model,
        "status": STATUS[record.state],
        "progress": 100 if record.state == "done" else progress.percent,
        "created_at": int(record.created_at),
        "completed_at": int(finished) if record.state == "done" and finished else None,
        "expires_at": int(finished + expires_after) if finished else None,
        "size": f"{width}x{height}" if second is None or model is None else _upscaled_size(model, values),
        "seconds": f"{frames / fps:g}",
        "prompt": record.request.prompt,
        "error": describe_failure(record, hide_paths),
        "stage": progress.stage if record.state == "running" else STATUS[record.state],
        "has_image": bool(values.get("image") or values.get("reference")),
        "has_video": any(values.get(name) for name in VIDEO_NAMES),
        "settings": {
            name: chosen.get(name, default)
            for name, default in dataclasses.asdict(defaults).items()
            if model is not None or name in chosen
        },
        "second_pass": None if second is None else dataclasses.asdict(second),
    }
    return answer


def describe_failure(record: Record, hide_paths: Callable[[str], str]) -> dict[str, str] | None:
    """Why a job has no result; None for a job that has one, or may have one."""
    if record.state not in ("failed", "cancelled"):
        return None
    return {"code": record.state, "message": hide_paths(record.error)}


def _upscaled_size(model: ServedModel, values: Mapping[str, Any]) -> str:
    try:
        result = model.passes(values)[-1]
    except InvalidValueError:  # of a server before, which took other values
        return "auto"
    return f"{result.width}x{result.height}"


def describe_model(model: ServedModel, created: float, sizes: Sizes = ()) -> dict[str, Any]:
    """`sizes`: those of `--sizes` that the model takes."""
    images = model.card.image
    usual = sorted({(size["width"], size["height"]) for size in model.card.sizes.values()})
    return {
        "id": model.name,
        "object": "model",
        "created": int(created),
        "owned_by": "comfy-tpu",
        "kind": model.kind,
        "takes_images": images is not None,
        "needs_image": images is not None and images.required,
        "defaults": dataclasses.asdict(model.defaults),
        "limits": dataclasses.asdict(model.card.limits),
        "presets": {name: dict(preset.settings) for name, preset in model.presets.items()},
        "sizes": [f"{width}x{height}" for width, height in sizes or usual],
        "max_images": 0 if images is None else max(images.max_images, images.max_frames),
        "max_references": model.card.max_references,
        "takes_videos": [f"input_{video.name}" for video in model.card.videos],
        "needs_videos": [f"input_{video.name}" for video in model.card.videos if video.required],
        "has_second_pass": not model.card.makes_segments,
        "has_guidance": model.card.guidance != "none",
        "has_negative_prompt": model.card.guidance == "classifier_free",
    }


def preview_url(content: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
