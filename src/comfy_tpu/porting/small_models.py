"""Small models for the trial: the same structure with two layers and two heads, built from a class or its config."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from comfy_tpu.bridge import build_skeleton, weight_shapes
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.json_input import read_json
from comfy_tpu.porting.inputs import Inputs, guess_inputs, parse_inputs
from comfy_tpu.porting.targets import ANY_ERROR, Target, describe_error
from comfy_tpu.quiet import quiet

PARAMETERS_MAX = 150_000_000
HEADS = 2
LAYERS = 2
WIDTH = 32
"""Features of embeddings that come in from outside: text, mostly."""

_PATTERNS = {
    "layers": r"(num|n)_.*layers|depth|(num_)?layers|num_blocks|approximator_layers",
    "repeats": r".*layers_per_block|num_res_blocks|layers_per_block_.*",
    "head_dim": r"attention_head_dim|cross_attention_head_dim|head_dim",
    "heads": r"num_attention_heads|num_heads|n_heads|num_cross_attention_heads",
    "kv_heads": r"num_kv_heads|n_kv_heads|num_key_value_heads|num_key_value_attention_heads",
    "text_width": r"text_embed_dim|text_dim|joint_attention_dim|caption_channels|cap_feat_dim|pooled_projection_dim|"
    r"cross_attention_input_dim|text_states_dim|context_dim|global_states_input_dim|text_emb_dim",
    "feed_forward": r"ffn_dim",
    "block_channels": r".*block_out_channels",
    "channels": r"(in|out)_channels",
    "rope_axes": r"axes_dims?_rope|rope_axes_dim",
    "base_dim": r"(decoder_)?base_dim",
    "sample": r"sample_(height|width|size)",
}
"""Kinds of sizes, with the names of the keys that hold them."""


@functools.cache
def known_small_models() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Config and inputs, as --config and --inputs have them, of diffusers' models whose names do not tell enough.

    Those have layouts of their own, or sizes that belong together; without inputs there, they are guessed.
    """
    table: Mapping[str, Mapping[str, Mapping[str, Any]]] = read_json(Path(__file__).with_name("small_models.json"))
    return table


@dataclasses.dataclass(frozen=True)
class SmallModel:
    model: torch.nn.Module
    """The module with weights, on the host, in eval mode."""
    skeleton: torch.nn.Module
    method: str
    inputs: Inputs
    config: Mapping[str, Any]


def entry_method(cls: type) -> str:
    """The method that runs on the device: an autoencoder's `decode`, any other model's `forward`."""
    return "decode" if hasattr(cls, "decode") and hasattr(cls, "encode") else "forward"


def make_small_model(
    target: Target, *, config: Mapping[str, Any] | None = None, inputs: Mapping[str, Any] | None = None
) -> SmallModel:
    """`config` and `inputs` as the user gave them: then nothing is guessed."""
    cls = target.load()
    method = entry_method(cls)
    known = known_small_models().get(target.name, {}) if target.is_diffusers else {}
    described = inputs if inputs is not None else known.get("inputs")
    errors: list[str] = []
    for candidate in [dict(config)] if config is not None else _candidate_configs(cls, target, known.get("config")):
        try:
            model = _build(cls, candidate)
            values = parse_inputs(described) if described is not None else guess_inputs(model, method)
            if "return_dict" in inspect.signature(getattr(model, method)).parameters:
                values["return_dict"] = False
            _check_input_names(model, method, values)
            if config is None and inputs is None and target.is_diffusers:
                with torch.no_grad(), quiet():
                    getattr(model, method)(**values)
        except (UnsupportedError, InvalidValueError):
            raise
        except ANY_ERROR as error:
            errors.append(describe_error(error))
            if config is not None or not target.is_diffusers:
                raise UnsupportedError(
                    f"{target.name} cannot be built ({errors[0]}); give --config and --inputs that it accepts"
                ) from error
            continue
        return SmallModel(model, build_skeleton(functools.partial(cls, **candidate)), method, values, candidate)
    raise UnsupportedError(
        f"no small {target.name} could be made and run ({errors[0]}); give --config and --inputs that PyTorch accepts"
    )


def _check_input_names(model: torch.nn.Module, method: str, inputs: Inputs) -> None:
    names = inspect.signature(getattr(model, method)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()):
        return
    unknown = sorted(set(inputs) - set(names))
    if unknown:
        raise InvalidValueError(
            f"inputs names {unknown[0]!r}, which {method} does not take; it takes {', '.join(names)}", field="inputs"
        )


def full_skeleton(target: Target) -> torch.nn.Module | None:
    """The module at the size of the config or the defaults, without weights; None where it cannot be built."""
    cls = target.load()
    known = set(inspect.signature(cls).parameters)
    try:
        with quiet():
            return build_skeleton(lambda: cls(**{key: value for key, value in target.config.items() if key in known}))
    except Exception:  # noqa: BLE001 a class without defaults
        return None


def _candidate_configs(cls: type, target: Target, known: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Configurations to try, the smallest first."""
    parameters = inspect.signature(cls).parameters
    given = {name: value for name, value in target.config.items() if name in parameters}
    full = {**{name: each.default for name, each in parameters.items()}, **given}
    missing = [
        name
        for name, each in parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and full[name] is each.empty
        and name not in (known or {})
    ]
    if missing:
        raise UnsupportedError(
            f"{target.name} cannot be built without {', '.join(missing)}; give them: "
            f"""--config '{{"{missing[0]}": 32}}'"""
        )
    if known is not None:
        yield {**given, **known}
    if target.is_diffusers:
        yield {**given, **shrink_config(full, {**_REPETITIONS, **_WIDTHS})}
        yield {**given, **shrink_config(full, _REPETITIONS)}
    yield given


Size = Callable[[int], int]
"""A function from the size in a configuration to a small one."""


def at_most(limit: int) -> Size:
    return lambda size: min(size, limit)


def always(value: int) -> Size:
    return lambda size: value


_REPETITIONS = {"repeats": always(1), "layers": at_most(LAYERS), "heads": at_most(HEADS)}
_WIDTHS = {
    "hidden": always(0),  # follows from heads
    "text_width": always(WIDTH),
    "feed_forward": always(2 * WIDTH),
    "base_dim": at_most(WIDTH),
    "block_channels": at_most(WIDTH),
    "sample": at_most(16),
}


def shrink_config(config: Mapping[str, Any], sizes: Mapping[str, Size]) -> dict[str, Any]:
    """The keys that change. `sizes` by what a key counts, or by the key; with `hidden`, widths follow from heads."""
    counts = {config_kind(key): value for key, value in reversed(list(config.items())) if type(value) is int}
    heads, features = counts.get("heads", 0), counts.get("head_dim", 0)
    small_heads = sizes["heads"](heads) if "heads" in sizes else heads
    small_features = sizes["head_dim"](features) if "head_dim" in sizes else features
    small: dict[str, Any] = {}
    for key, value in config.items():
        kind = config_kind(key)
        size = sizes.get(kind or key)
        if kind == "kv_heads" and heads:
            size = always(small_heads if value == heads else 1)
        elif "hidden" in sizes and value == heads * features and kind not in ("layers", "heads", "head_dim"):
            size = always(small_heads * small_features)
        if size is not None and value and type(value) is int and kind != "block_channels":
            small[key] = size(value)
        elif size is not None and isinstance(value, (tuple, list)) and kind in ("repeats", "block_channels"):
            small[key] = type(value)(map(size, value))
    return small


def config_kind(name: str) -> str:
    """The kind of size that a key of a configuration holds; empty where the key's name does not tell."""
    return next((kind for kind, pattern in _PATTERNS.items() if re.fullmatch(pattern, name)), "")


def _build(cls: type, config: Mapping[str, Any]) -> torch.nn.Module:
    factory = functools.partial(cls, **config)
    with quiet():
        size = sum(weight.numel() for weight in weight_shapes(build_skeleton(factory)).values())
        if size > PARAMETERS_MAX:
            raise ValueError(f"{size / 1e6:.0f} million weights are too many to try")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = factory().eval()
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.is_floating_point():
                        # Layers that begin as zeros would hide whatever is wrong before them.
                        weight.add_(torch.randn(weight.shape) * 0.02)
    return model.requires_grad_(False)
