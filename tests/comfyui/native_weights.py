"""The demo model in the layout of ComfyUI's own Wan nodes, so that the same weights run on both sides.

ComfyUI reads the original Wan names; diffusers has its own. The mapping is that of diffusers' conversion script, read
backwards. ComfyUI builds every Wan VAE with two residual blocks a stage and the demo has one: the others are blocks
whose last convolution is zero, which add nothing, exactly.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY

Weights = dict[str, torch.Tensor]
_STAGES = 4  # of every Wan VAE

_BLOCK = {
    "norm1.gamma": "residual.0.gamma",
    "conv1": "residual.2",
    "norm2.gamma": "residual.3.gamma",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_ENDS = {"conv_in": "conv1", "norm_out.gamma": "head.0.gamma", "conv_out": "head.2"}
_MIDDLE = {"mid_block.resnets.0": "middle.0", "mid_block.attentions.0": "middle.1", "mid_block.resnets.1": "middle.2"}

_TRANSFORMER = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "patch_embedding": "patch_embedding",
    "proj_out": "head.head",
    "scale_shift_table": "head.modulation",
}
_LAYER = {
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_out.0": "cross_attn.o",
    **{f"attn1.to_{name}": f"self_attn.{name}" for name in "qkv"},
    **{f"attn2.to_{name}": f"cross_attn.{name}" for name in "qkv"},
    **{f"attn1.norm_{name}": f"self_attn.norm_{name}" for name in "qk"},
    **{f"attn2.norm_{name}": f"cross_attn.norm_{name}" for name in "qk"},
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",
    "scale_shift_table": "modulation",
}


def write_demo_vae(path: Path) -> None:
    """For ComfyUI's models/vae."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(native_vae(load_file(DEMO_DIRECTORY / "vae" / "diffusion_pytorch_model.safetensors")), path)


def write_demo_transformer(path: Path) -> None:
    """For ComfyUI's models/diffusion_models. What ComfyUI cannot tell from the shapes stands in the metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = load_file(DEMO_DIRECTORY / "transformer" / "diffusion_pytorch_model.safetensors")
    config = json.loads((DEMO_DIRECTORY / "transformer" / "config.json").read_text(encoding="utf-8"))
    scale = json.loads((DEMO_DIRECTORY / "vae" / "config.json").read_text(encoding="utf-8"))
    metadata = {
        "num_heads": config["num_attention_heads"],
        "text_dim": config["text_dim"],
        "latents_mean": scale["latents_mean"],
        "latents_std": scale["latents_std"],
    }
    save_file(native_transformer(weights), path, {name: json.dumps(value) for name, value in metadata.items()})


def native_vae(weights: Weights) -> Weights:
    native: Weights = {}
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        if part in ("quant_conv", "post_quant_conv"):
            native[f"{'conv1' if part == 'quant_conv' else 'conv2'}.{rest}"] = tensor
        else:
            native[f"{part}.{_vae_name(part, rest)}"] = tensor
    for stage in range(_STAGES):
        native |= _identity(
            f"encoder.downsamples.{3 * stage + 1}", native[f"encoder.downsamples.{3 * stage}.residual.6.bias"]
        )
        native |= _identity(
            f"decoder.upsamples.{4 * stage + 2}", native[f"decoder.upsamples.{4 * stage + 1}.residual.6.bias"]
        )
    return native


def native_transformer(weights: Weights) -> Weights:
    native: Weights = {}
    for name, tensor in weights.items():
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            renamed = f"blocks.{layer}.{_renamed(rest, _LAYER)}"
        else:
            renamed = _renamed(name, _TRANSFORMER)
        native[renamed] = tensor.float()
    return native


def _vae_name(part: str, name: str) -> str:
    fields = name.split(".")
    if fields[0] == "mid_block":
        return _renamed(name, {f"{old}.{a}": f"{new}.{b}" for old, new in _MIDDLE.items() for a, b in _middle(old)})
    if fields[0] == "down_blocks":  # one list: residual block, resampler, residual block, …
        index, rest = int(fields[1]), ".".join(fields[2:])
        place = 3 * (index // 2) + 2 * (index % 2)
        return f"downsamples.{place}.{rest if index % 2 else _renamed(rest, _BLOCK)}"
    if fields[0] == "up_blocks":
        stage, kind, index, rest = int(fields[1]), fields[2], int(fields[3]), ".".join(fields[4:])
        if kind == "upsamplers":
            return f"upsamples.{4 * stage + 3}.{rest}"
        return f"upsamples.{4 * stage + index}.{_renamed(rest, _BLOCK)}"
    return _renamed(name, _ENDS)


def _middle(name: str) -> list[tuple[str, str]]:
    if "attentions" in name:
        return [(part, part) for part in ("norm.gamma", "to_qkv", "proj")]
    return list(_BLOCK.items())


def _renamed(name: str, table: dict[str, str]) -> str:
    """Refuses what it does not know: a weight left out would be a model that draws something else."""
    for old, new in table.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    raise KeyError(f"{name} has no name in ComfyUI's layout")


def _identity(prefix: str, bias: torch.Tensor) -> Weights:
    """A residual block that adds zero."""
    width = bias.shape[0]
    return {
        f"{prefix}.residual.0.gamma": torch.ones(width, 1, 1, 1),
        f"{prefix}.residual.2.weight": torch.zeros(width, width, 3, 3, 3),
        f"{prefix}.residual.2.bias": torch.zeros(width),
        f"{prefix}.residual.3.gamma": torch.ones(width, 1, 1, 1),
        f"{prefix}.residual.6.weight": torch.zeros(width, width, 3, 3, 3),
        f"{prefix}.residual.6.bias": torch.zeros(width),
    }
