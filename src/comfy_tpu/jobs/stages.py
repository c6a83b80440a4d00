"""One stage of a pipeline as a job: its input is a file that a client sent, its output one that it fetches.

encode      prompt, images and videos  →  embeddings
denoise     embeddings  →  latents, the artifact of `comfy-tpu denoise`
decode      latents  →  frames
decode_sound    latents  →  the waveform of a model that makes sound
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import OutputFile
from comfy_tpu.pipeline import artifacts, atomic
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.stage_messages import (
    FORMAT,
    StageMessage,
    embedding_tensors,
    pack,
    pack_settings,
    read_embeddings,
    read_media,
    read_message,
)
from comfy_tpu.pipeline.video import VideoPipeline


def run_stage(pipeline: VideoPipeline, values: Mapping[str, Any], folder: Folder, output: str) -> list[OutputFile]:
    """Carries out the stage of a request, and writes its result to the folder under the name `output`."""
    message = read_message(Path(values["input"]))
    settings = message.settings()
    with folder.writing() as directory, _previews(pipeline, values.get("preview")):
        path = Path(folder.check_inside(directory, output))
        _STAGES[values["stage"]](pipeline, message, settings, path)
        return folder.place(directory, [output])


def _encode(pipeline: VideoPipeline, message: StageMessage, settings: GenerationSettings, path: Path) -> None:
    given, prompt = read_media(message), message.metadata.get("prompt")
    if prompt is None:
        embeddings = PromptEmbeddings("", {}, None, shared=pipeline.encode_media(given, settings))
    elif given or message.metadata.get("media") == "true":
        embeddings = pipeline.encode(prompt, settings, given)
    else:  # a node encodes images and videos by itself
        embeddings = pipeline.encode_text(prompt, settings)
    tensors, described = embedding_tensors(embeddings)
    _write(path, tensors, settings, described)


def _denoise(pipeline: VideoPipeline, message: StageMessage, settings: GenerationSettings, path: Path) -> None:
    embeddings = read_embeddings(message)
    artifacts.save_latents(
        path,
        pipeline.denoise(embeddings, settings),
        embeddings.prompt,
        settings,
        pipeline,
        cut=embeddings.cut,
        loras=pipeline.loras.text,
        attention_window=pipeline.attention_window,
        quantization=pipeline.quantization,
    )


def _decode(pipeline: VideoPipeline, message: StageMessage, settings: GenerationSettings, path: Path) -> None:
    parts = pipeline.decode(message.tensors["latents"], settings)
    shape = (settings.num_videos, settings.num_frames, settings.height, settings.width, 3)
    with atomic.replacing(path) as partial, atomic.write_errors(path):
        frames, done = _map_frames(partial, shape, settings), 0
        for part in parts:
            frames[:, done : done + part.shape[1]] = part.numpy()
            done += part.shape[1]
        assert done == settings.num_frames
        frames.flush()


def _decode_sound(pipeline: VideoPipeline, message: StageMessage, settings: GenerationSettings, path: Path) -> None:
    sound = pipeline.decode_sound(message.tensors["latents"], settings)
    if sound is None:
        raise InvalidValueError(f"model={pipeline.model_name} makes no sound; choose another stage", field="stage")
    _write(path, {"sound": sound.samples}, settings, {"sample_rate": str(sound.rate)})


_STAGES = {"encode": _encode, "denoise": _denoise, "decode": _decode, "decode_sound": _decode_sound}
STAGES = tuple(_STAGES)


def _write(
    path: Path, tensors: Mapping[str, torch.Tensor], settings: GenerationSettings, described: Mapping[str, str]
) -> None:
    content = pack(tensors, {"settings": pack_settings(settings), **described})
    with atomic.replacing(path) as partial, atomic.write_errors(path):
        partial.write_bytes(content)


def _map_frames(path: Path, shape: tuple[int, ...], settings: GenerationSettings) -> np.memmap:
    """Safetensors with one array, to be filled: 0.9 GB for 81 frames at 1280×720 are not held in memory twice."""
    header: dict[str, Any] = {
        "__metadata__": {"format": str(FORMAT), "settings": pack_settings(settings)},
        "frames": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 4 * int(np.prod(shape))]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return np.memmap(path, np.float32, "r+", offset=8 + len(text), shape=shape)


@contextlib.contextmanager
def _previews(pipeline: VideoPipeline, path: str | None) -> Iterator[None]:
    """Writes the predicted latents of each step to a file, where one is named, before the step is reported."""
    report = pipeline.on_progress
    if path is None:
        yield
        return

    def report_with_preview(progress: Progress) -> None:
        if progress.preview is not None:
            content = pack({"latents": progress.preview().half()}, {"step": str(progress.done)})
            with atomic.replacing(Path(path)) as partial:
                partial.write_bytes(content)
        report(progress)

    pipeline.on_progress = report_with_preview
    try:
        yield
    finally:
        pipeline.on_progress = report
