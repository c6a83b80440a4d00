"""Small inputs for a model: as the user describes them, or guessed from the names and annotations of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from comfy_tpu.errors import InvalidValueError, UnsupportedError

TOKENS = 7
"""The length of a text: a number that no other size is."""
SIDE = 8
FRAMES = 3

Inputs = dict[str, Any]
Config = Mapping[str, Any]
Guess = Callable[[torch.nn.Module, Config], Any]


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
        if name == "return_dict":
            values[name] = False
            continue
        required = parameter.default is parameter.empty
        value = _GUESSES[name](model, config) if name in _GUESSES else None
        if name in ("timestep", "timesteps"):
            value = _timestep(str(parameter.annotation))
        if value is not None and (required or name not in _OPTIONAL):
            values[name] = value
        elif required:
            raise UnsupportedError(
                f"{type(model).__name__}.{method} needs {name!r}, and nothing says what that is; give it with "
                f"""--inputs '{{"{name}": [1, 16]}}'"""
            )
    return values


def _rank(model: torch.nn.Module) -> int:
    """The number of dimensions behind the channels."""
    for rank in (3, 2, 1):
        if f"{rank}D" in type(model).__name__:
            return rank
    for rank, kind in ((3, torch.nn.Conv3d), (2, torch.nn.Conv2d), (1, torch.nn.Conv1d)):
        if any(isinstance(module, kind) for module in model.modules()):
            return rank
    return 0


def _spatial(model: torch.nn.Module, channels: int, side: int = SIDE) -> torch.Tensor:
    sizes = {3: (FRAMES, side, side), 2: (side, side), 1: (4 * side,), 0: (4 * side,)}[_rank(model)]
    return tensor((1, sizes[0], channels) if _rank(model) == 0 else (1, channels, *sizes))


def _first(config: Config, *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _sample(model: torch.nn.Module, config: Config) -> torch.Tensor | None:
    channels = config.get("in_channels")
    if channels is None:
        return None
    names = inspect.signature(model.forward).parameters
    if "img_ids" in names or "img_shapes" in names:
        return tensor((1, 16, channels))
    if "num_frames" in names and "height" in names:
        return tensor((1, 2 * 4 * 4, channels))
    return _spatial(model, channels)


def _latent(model: torch.nn.Module, config: Config) -> torch.Tensor | None:
    channels = _first(config, "latent_channels", "z_dim", "decoder_input_channels")
    return None if channels is None else _spatial(model, channels, 4)


_TEXT_WIDTHS = (
    *("joint_attention_dim", "text_embed_dim", "caption_channels", "cap_feat_dim", "text_dim", "in_context_dim"),
    *("context_dim", "text_states_dim", "cross_attention_input_dim", "cross_attention_dim", "encoder_hid_dim"),
)


def _text(model: torch.nn.Module, config: Config) -> torch.Tensor | None:
    width = _first(config, *_TEXT_WIDTHS)
    return tensor((1, TOKENS, width)) if isinstance(width, int) else None


def _timestep(annotation: str) -> torch.Tensor:
    # 1 is a step of a thousand, and the end of 0 to 1 for a model that multiplies by a thousand itself, whatever it is
    # annotated with. 500 there is the sine of 500,000, where float32 is 0.03 apart: AuraFlow was 3e-4 from PyTorch.
    return torch.tensor([1]) if "Long" in annotation else torch.tensor([0.5])


def _pooled(model: torch.nn.Module, config: Config) -> torch.Tensor | None:
    width = config.get("pooled_projection_dim")
    return None if width is None else tensor((1, width))


def _ids(count: int) -> Guess:
    def guess(model: torch.nn.Module, config: Config) -> torch.Tensor:
        axes = len(_first(config, "axes_dims_rope", "axes_dim_rope") or (1, 1, 1))
        return torch.stack([torch.arange(count).remainder(4 + axis) for axis in range(axes)], dim=-1).float()

    return guess


_GUESSES: dict[str, Guess] = {
    **dict.fromkeys(("hidden_states", "sample"), _sample),
    **dict.fromkeys(("x", "z", "h"), _latent),
    "encoder_hidden_states": _text,
    "pooled_projections": _pooled,
    "guidance": lambda model, config: torch.tensor([4.0]) if config.get("guidance_embeds") else None,
    "class_labels": lambda model, config: torch.tensor([3]) if "num_embeds_ada_norm" in config else None,
    "img_ids": _ids(16),
    "txt_ids": _ids(TOKENS),
    "num_frames": lambda model, config: 2,
    "height": lambda model, config: 4,
    "width": lambda model, config: 4,
    "img_shapes": lambda model, config: [(1, 4, 4)],
    "encoder_attention_mask": lambda model, config: torch.ones(1, TOKENS, dtype=torch.int64),
    "encoder_hidden_states_mask": lambda model, config: torch.ones(1, TOKENS, dtype=torch.int64),
}
_OPTIONAL = ("encoder_hidden_states_mask", "encoder_attention_mask")
"""Guessed only where they must be given."""
