"""Wan VACE: the transformer, with blocks that read a control beside the noise, and one step of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from comfy_tpu.bridge import StackedLayers, scan_groups, scan_layers
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.shared.patches import PatchEmbedding
from comfy_tpu.families.wan import transformer
from comfy_tpu.parallel.rules import gather, replicate


def build_transformer(config: Mapping[str, Any]) -> torch.nn.Module:
    from diffusers import WanVACETransformer3DModel

    model: Any = WanVACETransformer3DModel.from_config(dict(config))
    layers, count = list(model.config.vace_layers), model.config.num_layers
    if count % len(layers) or layers != list(range(0, count, count // len(layers))):
        raise UnsupportedError(
            f"the transformer reads its control in the layers {', '.join(map(str, layers))} of {count}, expected every "
            "second or fifth one, beginning with 0; use one of the published models"
        )
    model.patch_embedding = PatchEmbedding.like(model.patch_embedding)
    model.vace_patch_embedding = PatchEmbedding.like(model.vace_patch_embedding)
    transformer.set_processors((*model.blocks, *model.vace_blocks))
    # The first block alone has a layer before it. Without that all of them are equal, as a scan needs them.
    first = model.vace_blocks[0]
    model.vace_proj_in = first.proj_in
    del first.proj_in
    first.proj_in = None
    return model


def _rename(name: str) -> str:
    return name.replace("vace_blocks.0.proj_in.", "vace_proj_in.")


_WAN = transformer.TRANSFORMER
TRANSFORMER = dataclasses.replace(
    _WAN,
    classes=("WanVACETransformer3DModel",),
    build=build_transformer,
    stacks=(LayerStack("vace_blocks"), LayerStack("blocks")),
    rename=_rename,
    quantized=(*_WAN.quantized, *(f"vace_{pattern}" for pattern in _WAN.quantized), "vace_blocks.*.proj_out"),
    rules=(
        *_WAN.rules,
        *(
            dataclasses.replace(rule, pattern=f"vace_{rule.pattern}")
            for rule in _WAN.rules
            if rule.pattern.startswith("blocks.")
        ),
        gather("vace_blocks.*.proj_out.weight"),
        replicate("vace_blocks.*.proj_out.bias"),
        gather("vace_proj_in.weight"),
        replicate("vace_proj_in.bias"),
        gather("vace_patch_embedding.weight"),
        replicate("vace_patch_embedding.bias"),
    ),
)


def prepare(
    module: Any,
    text: torch.Tensor,
    control: torch.Tensor,
    control_scale: torch.Tensor,
    padding_count: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Keys and values of the prompt in both kinds of blocks, and the control as it is."""
    return {
        **transformer.prompt_cache(module, text, padding_count),
        **transformer.prompt_cache(module, text, padding_count, blocks="vace_blocks"),
        "control": control,
        "control_scale": control_scale,
    }


PROMPT_AXES = {
    **transformer.PROMPT_AXES,
    **{f"vace_{name}": axes for name, axes in transformer.PROMPT_AXES.items()},
    "control": ("dp",),
}


def predict(
    module: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    guidance_scale: torch.Tensor,
    control: torch.Tensor,
    control_scale: torch.Tensor,
) -> torch.Tensor:
    """The velocity. A block of the control gives a hint, which is added behind the first of the blocks up to the next.

    The control's blocks do not depend on the others, so that a scan over groups of one block of the control and those
    that it belongs to holds one hint at a time. With all hints first, as diffusers has them, and one gathered for each
    block, the 14B at 720p takes 3.89 GB of temporaries a chip instead of 3.25 (libtpu 0.0.51, v6e-8, dp=2,sp=4).
    """
    step = transformer.begin_step(module, latents, timestep)
    hidden = step.hidden
    tokens = module.vace_patch_embedding(control.to(hidden.dtype)).flatten(2).transpose(1, 2)
    count = module.config.num_layers // len(module.config.vace_layers)
    is_first = torch.tensor([1.0] + [0.0] * (count - 1), dtype=hidden.dtype, device=hidden.device)

    def run_group(block: Any, members: StackedLayers, carry: Any, strength: torch.Tensor) -> Any:
        hidden, control = carry
        hint, control = block(step.hidden, step.text, control, step.modulation, step.rotary)
        hint = hint * strength

        def run_block(block: Any, hidden: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, None]:
            return block(hidden, step.text, step.modulation, step.rotary) + hint * share, None

        hidden, _ = scan_layers(members, run_block, hidden, is_first)
        return hidden, control

    carry = (hidden, module.vace_proj_in(tokens) + hidden)
    strengths = control_scale[0].to(hidden.dtype)  # the same for all rows
    hidden, _ = scan_groups(module.vace_blocks.layers, module.blocks.layers, run_group, carry, strengths)
    return transformer.end_step(module, hidden, step)
