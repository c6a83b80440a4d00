"""The peers' modules: diffusers' and transformers' own classes with random weights, made on the device that runs them.

The weights of a 14B never exist on the host. Our program is loaded from the same module
(`compiler.host_weights.HostWeights`), so that every peer has the same numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from comfy_tpu.bridge import build_skeleton
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config
from comfy_tpu.quiet import quiet

SEED = 0
Build = Callable[[ComponentSpec, Config], torch.nn.Module]


def build_published(spec: ComponentSpec, config: Config) -> torch.nn.Module:
    """The class that the component's config.json names, unmodified."""
    with quiet():
        import diffusers
        import transformers

    name = spec.classes[0]
    if found := getattr(diffusers, name, None):
        module: torch.nn.Module = found.from_config(copy.deepcopy(dict(config)))
        return module
    found = getattr(transformers, name, None)
    if found is None:
        raise UnsupportedError(f"neither diffusers nor transformers has {name}, the class of the {spec.name}")
    built: torch.nn.Module = found(found.config_class(**copy.deepcopy(dict(config))))
    return built


def build_ours(spec: ComponentSpec, config: Config) -> torch.nn.Module:
    """The module that our programs are traced from, before its layers are stacked."""
    return spec.build(copy.deepcopy(dict(config)))


def empty_module(spec: ComponentSpec, config: Config, build: Build = build_published) -> torch.nn.Module:
    """Without weights, to count operations."""
    return build_skeleton(lambda: build(spec, config))


def random_module(
    spec: ComponentSpec,
    config: Config,
    *,
    device: torch.device,
    dtype: torch.dtype,
    build: Build = build_published,
) -> torch.nn.Module:
    """The peers' module of a component. Weights that diffusers keeps in float32 are float32."""
    module = empty_module(spec, config, build)
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ()) if build is build_published else set()
    generator = torch.Generator(device=device).manual_seed(SEED)
    made: dict[int, torch.nn.Parameter] = {}
    with torch.no_grad():
        for path, owner in module.named_modules():
            for name, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                full = f"{path}.{name}" if path else name
                if id(parameter) not in made:  # one object for tied weights
                    own = torch.float32 if kept.intersection(full.split(".")) else dtype
                    empty = torch.empty(parameter.shape, device=device, dtype=own)
                    made[id(parameter)] = torch.nn.Parameter(_fill(full, empty, generator), requires_grad=False)
                owner._parameters[name] = made[id(parameter)]
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = _filled_buffer(name, buffer, device)
    return module.eval()


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values whose activations neither vanish nor explode over forty layers: the errors should mean something."""
    if name.endswith("bias"):
        return tensor.normal_(0, 0.02, generator=generator)
    if tensor.ndim == 1 or name.endswith("gamma"):  # the scale of a norm
        return tensor.normal_(1, 0.1, generator=generator)
    fan_in = math.prod(tensor.shape[1:])
    return tensor.normal_(0, fan_in**-0.5, generator=generator)


def _filled_buffer(name: str, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not buffer.is_meta:
        return buffer.to(device)
    # Statistics: a deviation of zero would leave nothing to compare.
    return torch.full_like(buffer, 1 if name.endswith(("std", "var")) else 0, device=device)


def in_float32(
    module: torch.nn.Module, spec: ComponentSpec, config: Config, build: Build = build_published
) -> torch.nn.Module:
    """The same numbers in float32: every output is compared with this module's."""
    reference: Any = empty_module(spec, config, build)
    device = next(module.parameters()).device
    for owner in reference.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in module.state_dict().items()
    }
    reference.load_state_dict(tensors, assign=True)
    converted: torch.nn.Module = reference.eval().requires_grad_(False)
    return converted


def counted_operations(module: torch.nn.Module, call: Callable[[Any], Any]) -> float | None:
    """Products, convolutions and attention of `call(module)` by torch's own counter, without weights: `call` makes meta
    inputs. None where the module looks at values, which meta tensors do not have."""
    from torch.utils.flop_counter import FlopCounterMode

    module = module.to("meta")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(module)
    except (NotImplementedError, RuntimeError, ValueError):
        return None
    return float(counter.get_total_flops())
