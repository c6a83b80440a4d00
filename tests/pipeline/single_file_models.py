"""Model directories as single files: what the tests of single files share."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from comfy_tpu.compiler.checkpoint import TensorInfo
from comfy_tpu.config import RuntimeConfig, SingleFiles
from comfy_tpu.pipeline import single_files
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline
from tests.parity import small_models
from tests.pipeline import original_names

SIZES = {"height": 64, "width": 64, "num_inference_steps": 2, "max_sequence_length": 32}


def weights(directory: Path, part: str) -> dict[str, torch.Tensor]:
    (path,) = (directory / part).glob("*.safetensors")
    return load_file(path)


@functools.cache
def bare(directory: Path) -> Path:
    """The model directory without its weights: configurations and tokenizers."""
    path = small_models.temporary_directory()
    shutil.copytree(directory, path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    return path


def video(model: str | Path | SingleFiles, **settings: Any) -> torch.Tensor:
    pipeline = VideoPipeline.open(model, RuntimeConfig(mesh="single", dtype="float32"))
    chosen = pipeline.settings(**{**SIZES, **settings})
    return torch.cat(list(pipeline.generate("a red circle", chosen)), dim=1)


def tensors(model: ModelFiles, part: str) -> dict[str, torch.Tensor]:
    (spec,) = (spec for spec in model.family.components if spec.name == part)
    source = model.checkpoint(spec)
    return {name: source.read(name).clone() for name in source.tensors}


def changed_file(path: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    content = load_file(source)
    change(content)
    return original_names.save(path, content)


def header(model: str, hub_id: str, rename: Callable[[original_names.Tensors], original_names.Tensors]) -> Any:
    """The header of a published transformer under its authors' names; its weights are not needed."""
    skeleton = {
        name: torch.empty(shape, device="meta") for name, shape in single_files.published_shapes(model, hub_id).items()
    }
    path = Path(f"{model}.safetensors")
    infos = {name: TensorInfo(name, tuple(each.shape), torch.bfloat16, path) for name, each in rename(skeleton).items()}
    return SimpleNamespace(path=path, tensors=infos)
