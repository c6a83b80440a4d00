"""The peers' modules: diffusers' and transformers' own classes with random weights, made where they will run.

The weights of a 14B never exist on the host. Whoever measures our program loads it from the same module
(`compiler.host_weights.HostWeights`), so that every peer has the same numbers.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from comfy_tpu.bridge import build_skeleton
from comfy_tpu.compiler.component import ComponentSpec

SEED = 0


def build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    module: torch.nn.Module = WanTransformer3DModel.from_config(dict(config))
    return module


def build_vae(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import AutoencoderKLWan

    module: torch.nn.Module = AutoencoderKLWan.from_config(dict(config))
    return module


def build_text_encoder(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    module: torch.nn.Module = UMT5EncoderModel(UMT5Config(**config))
    return module


BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], torch.nn.Module]] = {
    "transformer": build_transformer,
    "vae": build_vae,
    "text_encoder": build_text_encoder,
}


def empty_module(spec: ComponentSpec, config: Mapping[str, Any]) -> torch.nn.Module:
    """Without weights, to count operations."""
    return build_skeleton(lambda: BUILDERS[spec.name](config))


def random_module(
    spec: ComponentSpec, config: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    """The peers' module of a component. Weights that the component keeps in float32, diffusers keeps so too."""
    module = empty_module(spec, config)
    generator = torch.Generator(device=device).manual_seed(SEED)
    made: dict[int, torch.nn.Parameter] = {}
    with torch.no_grad():
        for path, owner in module.named_modules():
            for name, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                full = f"{path}.{name}" if path else name
                if id(parameter) not in made:  # one object for tied weights
                    kept = any(fnmatch.fnmatchcase(full, pattern) for pattern in spec.float32)
                    empty = torch.empty(parameter.shape, device=device, dtype=torch.float32 if kept else dtype)
                    made[id(parameter)] = torch.nn.Parameter(_filled(full, empty, generator), requires_grad=False)
                owner._parameters[name] = made[id(parameter)]
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    filled = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                    owner._buffers[name] = filled
    return module.eval()


def _filled(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values whose activations neither vanish nor explode over forty layers: the errors should mean something."""
    if name.endswith("bias"):
        return tensor.normal_(0, 0.02, generator=generator)
    if tensor.ndim == 1 or name.endswith("gamma"):  # the scale of a norm
        return tensor.normal_(1, 0.1, generator=generator)
    fan_in = math.prod(tensor.shape[1:])
    return tensor.normal_(0, fan_in**-0.5, generator=generator)


def in_float32(module: torch.nn.Module, spec: ComponentSpec, config: Mapping[str, Any]) -> torch.nn.Module:
    """The same numbers in float32: what everybody's output is held against."""
    reference = empty_module(spec, config)
    device = next(module.parameters()).device
    for owner in reference.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)
    reference.load_state_dict({name: tensor.float() for name, tensor in module.state_dict().items()}, assign=True)
    return reference.eval().requires_grad_(False)
