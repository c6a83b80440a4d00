"""LoRA files for any model, in the form that trainers write. Import it where ComfyUI runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.utils
import nodes
import torch

from tests.native.architectures import noise

RANK = 4


def write_lora(model: Any, path: Path, *, seed: int, every: int = 1, amount: float = 0.3) -> list[str]:
    """Low-rank changes of the attention and feed-forward weights; the names of the weights."""
    state = model.model.diffusion_model.state_dict()
    names = [name for name, tensor in state.items() if _is_matrix(name, tensor) and "block" in name]
    chosen = names[seed % every :: every]
    _write(state, chosen, "diffusion_model.", path, seed, amount)
    return chosen


def write_text_lora(clip: Any, path: Path, *, seed: int) -> None:
    """Of every layer of every text model in it."""
    state = clip.cond_stage_model.state_dict()
    layers = [
        name for name, tensor in state.items() if _is_matrix(name, tensor) and (".layers." in name or ".block." in name)
    ]
    _write(state, layers, "text_encoders.", path, seed, 0.3)


def _is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.ndim == 2


def _write(state: dict[str, torch.Tensor], names: list[str], prefix: str, path: Path, seed: int, amount: float) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for number, name in enumerate(names):
        height, width = state[name].shape
        scale = amount * float(state[name].std()) * (RANK**-0.5)
        layer = f"{prefix}{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_down.weight"] = noise(seed + number, RANK, width)
        tensors[f"{layer}.lora_up.weight"] = noise(seed + number + 1, height, RANK) * scale
        tensors[f"{layer}.alpha"] = torch.tensor(float(RANK))
    comfy.utils.save_torch_file(tensors, str(path))


def apply_lora(model: Any, name: str, strength: float) -> Any:
    """As the LoRA loader node does."""
    (patched,) = nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)
    return patched


def apply_text_lora(clip: Any, name: str, strength: float) -> Any:
    """As the LoRA loader node does."""
    _, patched = nodes.LoraLoader().load_lora(None, clip, name, 0.0, strength)
    return patched
