"""Stages that write files and need no model: videos, sequences of frames, artifacts, curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from comfy_tpu.cli.main import _user_message
from comfy_tpu.config import GenerationSettings
from comfy_tpu.pipeline import artifacts, media, reuse
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from tests.faults.examination import Stage

KINDS = ("create", "open", "read", "map", "write", "rename", "fsync", "kill")

MakeStage = Callable[[Path, Callable[[Path], None]], tuple[Stage, Iterable[str]]]


class _Model:
    model_name, model_fingerprint, dtype_name = "model", "1234", "float32"


def as_command(write: Callable[[], object]) -> Callable[[], tuple[int, str]]:
    """Errors become sentences as those of a command do."""

    def run() -> tuple[int, str]:
        try:
            write()
        except Exception as error:
            sentence = _user_message(error)
            if sentence is None:
                raise
            return 1, f"comfy-tpu: {sentence}"
        return 0, ""

    return run


def frames(count: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.rand(1, count, 32, 48, 3, generator=torch.Generator().manual_seed(seed))


def write_video(output: str | Path, count: int = 5, seed: int = 1, sheet: Path | None = None) -> None:
    parts = frames(count, seed).split(2, dim=1)
    paths = media.check_output(output)
    media.write_videos(paths, parts, fps=8, metadata=[{"prompt": f"{seed}"}], sheet=sheet)


def _video(name: str) -> MakeStage:
    def make(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
        return Stage(name, as_command(lambda: write_video(work / name, sheet=work / "sheet.png"))), KINDS

    return make


def _frames(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    """Over a longer sequence of an earlier run."""
    write_video(f"{work}/frames/", count=7, seed=2)
    return Stage("frames", as_command(lambda: write_video(f"{work}/frames/"))), KINDS


def _artifacts(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    """Two that are written over earlier ones, and read."""
    text, latents, settings = work / "text.safetensors", work / "latents.safetensors", GenerationSettings()
    embeddings = PromptEmbeddings("a prompt", {"text": frames()[:, 0]}, None)

    def write(scale: float) -> None:
        rows = {"text": embeddings.positive["text"] * scale}
        artifacts.save_text(text, PromptEmbeddings("a prompt", rows, None), settings, _Model())
        loaded, _ = artifacts.load_text(text, _Model())
        made = loaded.positive["text"].reshape(1, 3, 1, 32, 48)
        artifacts.save_latents(latents, made, "a prompt", settings, _Model())
        artifacts.load_latents(latents, _Model())

    write(2.0)
    return Stage("artifacts", as_command(lambda: write(1.0))), KINDS


def _curve(work: Path, watch: Callable[[Path], None]) -> tuple[Stage, Iterable[str]]:
    curve = reuse.Curve(np.array([1.0, 0.5]), np.ones(2), np.array([0.0, 0.1]))

    def write() -> None:
        reuse.save_curve(work / "reuse.json", curve, family="wan", fingerprint="1", made_with={})

    return Stage("curve", as_command(write)), KINDS


STAGES: dict[str, MakeStage] = {
    "mp4": _video("x.mp4"),
    "gif": _video("x.gif"),
    "npy": _video("x.npy"),
    "frames": _frames,
    "artifacts": _artifacts,
    "curve": _curve,
}
