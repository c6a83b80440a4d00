"""Pads a batch to a size that is compiled already.

Regional prompts, DualCFG, PerpNeg and ranges of ControlNets change the number of rows from step to step, and every
number would be a program of 20 to 60 s.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

MAX_WORK = 2
"""The largest ratio of padded to real rows: the activations of more rows may not fit, and one step of a large video
model already takes as long as a compilation."""
ROW_ARGUMENTS = frozenset(
    {"x", "timestep", "timesteps", "context", "y", "guidance", "control", "clip_fea", "txt_byt5", "attention_mask"}
    | {"ref_latents"}
)
"""Arguments whose tensors have one row for each sample, or one for all."""
ROW_WISE_MODELS = frozenset(
    {"WanModel", "Flux", "OpenAISignatureMMDITWrapper", "UNetModel", "QwenImageTransformer2DModel", "HunyuanVideo"}
)
"""Models whose rows do not see each other, tested in tests/native."""


def has_independent_rows(module: Any, arguments: dict[str, Any]) -> bool:
    """Whether another row would not change the results of the others."""
    if type(module).__name__ not in ROW_WISE_MODELS or getattr(module, "default_num_video_frames", None) is not None:
        return False  # the U-Net of Stable Video Diffusion has a frame in each row
    return all(name in ROW_ARGUMENTS or not _has_tensors(value) for name, value in arguments.items())


def describe_rows(tree: Any, rows: int) -> Hashable | None:
    """A key of a call's arguments without their number of rows; None if a tensor has another number of rows."""
    if isinstance(tree, torch.Tensor):
        if not tree.ndim or tree.shape[0] not in (1, rows):
            return None
        return tree.shape[0] == rows, tuple(tree.shape[1:]), tree.dtype
    if isinstance(tree, dict):
        return _joined(dict, ((name, describe_rows(value, rows)) for name, value in tree.items()))
    if isinstance(tree, (list, tuple)):
        return _joined(type(tree), ((index, describe_rows(value, rows)) for index, value in enumerate(tree)))
    if isinstance(tree, (bool, int, float, str, type(None), torch.dtype)):
        return type(tree), tree
    return None


def _joined(kind: type, parts: Any) -> Hashable | None:
    found = tuple(parts)
    return None if any(part is None for _, part in found) else (kind, found)


def pad_rows(tree: Any, rows: int, size: int) -> Any:
    """The arguments with `size` rows: copies of the last row are added, which cannot overflow where it does not."""
    if size == rows:
        return tree
    if isinstance(tree, torch.Tensor):
        if tree.shape[0] != rows:
            return tree
        return torch.cat([tree, tree[-1:].expand(size - rows, *tree.shape[1:])])
    if isinstance(tree, dict):
        return {name: pad_rows(value, rows, size) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(pad_rows(value, rows, size) for value in tree)
    return tree


def _has_tensors(tree: Any) -> bool:
    """Whether there are tensors in a tree."""
    if isinstance(tree, dict):
        return any(map(_has_tensors, tree.values()))
    return any(map(_has_tensors, tree)) if isinstance(tree, (list, tuple)) else isinstance(tree, torch.Tensor)
