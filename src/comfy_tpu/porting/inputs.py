"""Small inputs for a model: as the user describes them, or guessed from the names and annotations of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.errors import InvalidValueError, UnsupportedError

TOKENS = 7
"""The length of a text: a number that no other size is."""
IMAGE_TOKENS = 16
SIDE = 8
FRAMES = 3

Inputs = dict[str, Any]
Config = Mapping[str, Any]


def parse_inputs(described: Mapping[str, Any]) -> Inputs:
    """Inputs from JSON: a list of numbers is a tensor's shape, an object has a dtype or a value, all else is itself."""
    return {name: _parse_input(name, value) for name, value in described.items()}


def _parse_input(name: str, value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(size, int) and not isinstance(size, bool) for size in value):
        return tensor(_shape(name, value))
    if isinstance(value, list):
        return [_parse_input(name, item) for item in value]
    if isinstance(value, dict):
        if set(value) <= {"shape", "dtype"} and "shape" in value:
            return tensor(_shape(name, value["shape"]), value.get("dtype", "float32"))
        if set(value) <= {"value", "dtype"} and "value" in value:
            dtype = _dtype(value["dtype"]) if "dtype" in value else None
            return value["value"] if dtype is None else _make_value(name, value["value"], dtype)
        raise InvalidValueError(
            f"inputs: {name} is an object with {', '.join(value)}; expected "
            '{"shape": [1, 16], "dtype": "int64"} or {"value": 3}'
        )
    return value


def _shape(name: str, value: Any) -> list[int]:
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return value
    raise InvalidValueError(f"inputs: {name} has the shape {value!r}, expected a list of sizes such as [1, 16]")


def _make_value(name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidValueError(
            f"inputs: {name} has the value {value!r}, of which no tensor can be made ({error}); give numbers"
        ) from None


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidValueError(f"inputs: there is no dtype {name}; use float32, bfloat16, int64 or bool")
    return dtype


def tensor(shape: list[int] | tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    kind = _dtype(dtype)
    if kind is torch.bool:
        return torch.ones(*shape, dtype=kind)
    if not kind.is_floating_point:
        return torch.arange(torch.Size(shape).numel()).reshape(*shape).remainder(3).to(kind)
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator).to(kind)


def guess_inputs(model: torch.nn.Module, method: str) -> Inputs:
    """One for every argument that must be given, and for those without which diffusers' models do not run."""
    config = dict(getattr(model, "config", {}) or {})
    values: Inputs = {}
    for name, parameter in inspect.signature(getattr(model, method)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_required = parameter.default is parameter.empty
        value = _guess_input(name, str(parameter.annotation), model, config)
        if value is not None and (is_required or name not in _MASKS):
            values[name] = value
        elif is_required:
            raise UnsupportedError(
                f"{type(model).__name__}.{method} needs {name!r}, and nothing says what that is; give it with "
                f"""--inputs '{{"{name}": [1, 16]}}'"""
            )
    return values


_MASKS = ("encoder_attention_mask", "encoder_hidden_states_mask")
"""Guessed only where they must be given."""
_TEXT_WIDTHS = (
    *("joint_attention_dim", "text_embed_dim", "caption_channels", "cap_feat_dim", "text_dim", "in_context_dim"),
    *("context_dim", "text_states_dim", "cross_attention_input_dim", "cross_attention_dim", "encoder_hid_dim"),
)


def _guess_input(name: str, annotation: str, model: torch.nn.Module, config: Config) -> Any:
    """None where neither the name nor the configuration tells."""
    text_width = _first(config, *_TEXT_WIDTHS)
    match name:
        case "hidden_states" | "sample" if config.get("in_channels") is not None:
            return _guess_sample(model, config["in_channels"])
        case "x" | "z" | "h":
            channels = _first(config, "latent_channels", "z_dim", "decoder_input_channels")
            return None if channels is None else _spatial_tensor(model, channels, 4)
        case "encoder_hidden_states" if isinstance(text_width, int):
            return tensor((1, TOKENS, text_width))
        case "pooled_projections" if config.get("pooled_projection_dim") is not None:
            return tensor((1, config["pooled_projection_dim"]))
        case "timestep" | "timesteps":
            # 1 is a step of a thousand, and the end of 0 to 1 for a model that multiplies by a thousand itself,
            # whatever it is annotated with. 500 there is the sine of 500,000, where float32 is 0.03 apart: AuraFlow
            # was 3e-4 from PyTorch.
            return torch.tensor([1]) if "Long" in annotation else torch.tensor([0.5])
        case "guidance" if config.get("guidance_embeds"):
            return torch.tensor([4.0])
        case "class_labels" if "num_embeds_ada_norm" in config:
            return torch.tensor([3])
        case "img_ids" | "txt_ids":
            count = torch.arange(IMAGE_TOKENS if name == "img_ids" else TOKENS)
            axes = len(_first(config, "axes_dims_rope", "axes_dim_rope") or (1, 1, 1))
            return torch.stack([count.remainder(4 + axis) for axis in range(axes)], dim=-1).float()
        case "encoder_attention_mask" | "encoder_hidden_states_mask":
            return torch.ones(1, TOKENS, dtype=torch.int64)
        case "img_shapes":
            return [(1, 4, 4)]
        case _:
            return {"num_frames": 2, "height": 4, "width": 4, "return_dict": False}.get(name)


def _first(config: Config, *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _guess_sample(model: torch.nn.Module, channels: int) -> torch.Tensor:
    names = inspect.signature(model.forward).parameters
    if "img_ids" in names or "img_shapes" in names:
        return tensor((1, IMAGE_TOKENS, channels))
    if "num_frames" in names and "height" in names:
        return tensor((1, 2 * 4 * 4, channels))
    return _spatial_tensor(model, channels, SIDE)


def _spatial_tensor(model: torch.nn.Module, channels: int, side: int) -> torch.Tensor:
    """A tensor with as many dimensions behind the channels as the model's name or its convolutions have."""
    name = type(model).__name__
    kinds = {3: torch.nn.Conv3d, 2: torch.nn.Conv2d, 1: torch.nn.Conv1d}
    ranks = [rank for rank in kinds if f"{rank}D" in name] + [
        rank for rank, kind in kinds.items() if any(isinstance(module, kind) for module in model.modules())
    ]
    sizes = {3: (FRAMES, side, side), 2: (side, side), 1: (4 * side,)}
    return tensor((1, channels, *sizes[ranks[0]]) if ranks else (1, 4 * side, channels))
