"""Small models with random weights, of the classes that ComfyUI itself builds for the real ones.

Where ComfyUI's detection allows a small model, it is written to a file and comes back through ComfyUI's own loader; the
widths of the others are fixed there, so those are built by its class for the model.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

Conditioning = list[list[Any]]
Text = Callable[[int, int, tuple[int, ...]], Conditioning]
"""(tokens, seed, shape of the latent) -> what a text encoder gives, and the nodes behind it add."""


@dataclasses.dataclass(frozen=True, eq=False)
class Architecture:
    name: str
    model_class: str
    """In comfy.supported_models."""
    config: dict[str, Any]
    latents: tuple[tuple[int, ...], ...]
    """[channels, …] at two resolutions."""
    text: Text
    tokens: tuple[int, int] = (20, 27)
    """A prompt, and one of another length."""
    longer: tuple[int, ...] = ()
    """Two lengths that exceed the one to which its tokenizer fills up texts."""
    from_file: bool = False
    any_length: bool = False
    """Its tokenizer does not fill up texts, so that every prompt has a length of its own."""

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> ModelPatcher:
        import comfy.model_patcher
        import comfy.supported_models

        config = getattr(comfy.supported_models, self.model_class)(dict(self.config))
        config.set_inference_dtype(dtype, None)
        model = config.get_model({}, "", device=None)
        fill(model.diffusion_model, seed)
        if self.from_file and dtype == torch.float32:  # a CPU's loader would make any file float32
            return self.load(self.write(model.diffusion_model))
        model.eval()
        cpu = torch.device("cpu")
        return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)

    @staticmethod
    def write(diffusion_model: torch.nn.Module) -> Path:
        import comfy.utils

        path = Path(tempfile.mkdtemp()) / "model.safetensors"
        comfy.utils.save_torch_file(diffusion_model.state_dict(), str(path))
        return path

    @staticmethod
    def load(path: Path) -> ModelPatcher:
        import comfy.sd

        model = comfy.sd.load_diffusion_model(str(path))
        path.unlink()
        path.parent.rmdir()
        return model

    def prompt(self, tokens: int, seed: int, size: int = 0) -> Conditioning:
        return self.text(tokens, seed, self.latents[size])


def fill(module: torch.nn.Module, seed: int) -> None:
    """Random weights with which a signal neither dies nor explodes."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point():
                continue
            width = tensor[0].numel() if tensor.ndim > 1 else 400
            tensor.copy_(torch.randn(tensor.shape, generator=random) / width**0.5)
            if tensor.ndim == 1 and name.endswith(("weight", "scale", "gamma", "running_var")):
                tensor.add_(1)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _plain(width: int) -> Text:
    return lambda tokens, seed, latent: [[noise(seed, 1, tokens, width), {}]]


def _pooled(features: int, pooled: int, **more: Any) -> Text:
    return lambda tokens, seed, latent: [
        [noise(seed, 1, tokens, features), {"pooled_output": noise(seed + 1, 1, pooled), **more}]
    ]


class SeenImage:
    """An image as CLIP Vision sees it."""

    def __init__(self) -> None:
        self.penultimate_hidden_states = noise(5, 1, 257, 1280)
        self.last_hidden_state = noise(6, 1, 16, 1152)


def _from_image(tokens: int, seed: int, latent: tuple[int, ...], *, seen: bool = True) -> Conditioning:
    """As Wan's node for images to video has it."""
    known = torch.ones(1, 1, *latent[1:])
    known[:, :, 0] = 0
    more: dict[str, Any] = {"concat_latent_image": noise(7, 1, *latent), "concat_mask": known}
    return [[noise(seed, 1, tokens, 4096), more | ({"clip_vision_output": SeenImage()} if seen else {})]]


def _hunyuan(tokens: int, seed: int, latent: tuple[int, ...]) -> Conditioning:
    """Words to be drawn go through a second encoder, and are there in some prompts only."""
    more: dict[str, Any] = {"pooled_output": None}
    if seed % 4 < 2:
        more["conditioning_byt5small"] = noise(seed + 2, 1, 4 + seed % 7, 1472)
    return [[noise(seed, 1, tokens, 64), more]]


_WAN = {"image_model": "wan2.1", "model_type": "t2v", "dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 3}
_SDXL_TEXT = _pooled(64, 1280, width=128, height=128)

ARCHITECTURES = (
    Architecture(
        "Wan 2.1 T2V",
        "WAN21_T2V",
        {**_WAN, "in_dim": 16, "out_dim": 16},
        ((16, 3, 8, 8), (16, 2, 6, 10)),
        _plain(4096),
        from_file=True,
    ),
    Architecture(
        "Wan 2.1 I2V",
        "WAN21_I2V",
        {**_WAN, "model_type": "i2v", "in_dim": 36, "out_dim": 16},
        ((16, 3, 8, 8), (16, 2, 6, 10)),
        _from_image,
        from_file=True,
    ),
    Architecture(
        "Wan 2.2 14B I2V",
        "WAN21_T2V",
        {**_WAN, "in_dim": 36, "out_dim": 16},
        ((16, 3, 8, 8), (16, 2, 6, 10)),
        functools.partial(_from_image, seen=False),
        from_file=True,
    ),
    Architecture(
        "Wan 2.2 5B",
        "WAN22_T2V",
        {**_WAN, "in_dim": 48, "out_dim": 48},
        ((48, 3, 8, 8), (48, 2, 6, 10)),
        _plain(4096),
        from_file=True,
    ),
    Architecture(
        "Flux.1",
        "Flux",
        {
            "image_model": "flux",
            "axes_dim": [8, 12, 12],
            "num_heads": 4,
            "mlp_ratio": 4.0,
            "theta": 10000,
            "out_channels": 16,
            "in_channels": 16,
            "qkv_bias": True,
            "txt_ids_dims": [],
            "hidden_size": 128,
            "context_in_dim": 64,
            "patch_size": 2,
            "vec_in_dim": 48,
            "depth": 3,
            "depth_single_blocks": 3,
            "guidance_embed": True,
        },
        ((16, 8, 10), (16, 12, 6)),
        _pooled(64, 48),
        tokens=(256, 300),
        longer=(270, 411),
    ),
    Architecture(
        "Flux.2",
        "Flux2",
        {
            "image_model": "flux2",
            "axes_dim": [8, 8, 8, 8],
            "num_heads": 4,
            "mlp_ratio": 3.0,
            "theta": 2000,
            "out_channels": 128,
            "in_channels": 128,
            "global_modulation": True,
            "mlp_silu_act": True,
            "qkv_bias": False,
            "ops_bias": False,
            "default_ref_method": "index",
            "ref_index_scale": 10.0,
            "txt_ids_dims": [3],
            "hidden_size": 128,
            "context_in_dim": 64,
            "patch_size": 1,
            "vec_in_dim": None,
            "depth": 3,
            "depth_single_blocks": 3,
            "guidance_embed": True,
        },
        ((128, 8, 10), (128, 6, 4)),
        _pooled(64, 48),
        tokens=(512, 600),
        longer=(530, 700),
    ),
    Architecture(
        "HunyuanVideo-1.5",
        "HunyuanVideo15",
        {
            "image_model": "hunyuan_video",
            "in_channels": 65,
            "patch_size": [1, 1, 1],
            "out_channels": 32,
            "vec_in_dim": None,
            "axes_dim": [16, 56, 56],
            "meanflow": False,
            "context_in_dim": 64,
            "hidden_size": 256,
            "mlp_ratio": 4.0,
            "num_heads": 2,
            "depth": 3,
            "depth_single_blocks": 0,
            "theta": 256,
            "qkv_bias": True,
            "byt5": True,
            "guidance_embed": False,
            "use_cond_type_embedding": True,
            "vision_in_dim": 1152,
            "meanflow_sum": True,
        },
        ((32, 3, 4, 6), (32, 2, 6, 4)),
        _hunyuan,
        from_file=True,
        any_length=True,
    ),
    Architecture(
        "SD3.5",
        "SD3",
        {
            "in_channels": 16,
            "patch_size": 2,
            "out_channels": 16,
            "depth": 4,
            "input_size": None,
            "adm_in_channels": 2048,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 64, "out_features": 256},
            },
            "num_patches": 64,
            "pos_embed_max_size": 8,
            "qk_norm": "rms",
            "x_block_self_attn_layers": [0, 1],
            "pos_embed_scaling_factor": None,
        },
        ((16, 8, 8), (16, 6, 10)),
        _pooled(64, 2048),
        tokens=(154, 231),
        longer=(200, 254),
        from_file=True,
    ),
    Architecture(
        "SDXL",
        "SDXL",
        {
            "image_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "model_channels": 32,
            # Two of a kind one after the other, as the real one has them: they look like a list to scan.
            "num_res_blocks": [2, 2, 2],
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 1, 1, 2, 2],
            "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
            "transformer_depth_middle": 2,
            "context_dim": 64,
            "adm_in_channels": 2816,
            "use_linear_in_transformer": True,
            "use_spatial_transformer": True,
            "legacy": False,
            "num_classes": "sequential",
            "num_head_channels": 16,
            "num_heads": -1,
            "use_temporal_attention": False,
        },
        ((4, 16, 16), (4, 12, 20)),
        _SDXL_TEXT,
        tokens=(77, 154),
        longer=(154, 231),
    ),
    Architecture(
        "Qwen-Image",
        "QwenImage",
        {
            "image_model": "qwen_image",
            "in_channels": 64,
            "num_layers": 3,
            "num_attention_heads": 2,
            "attention_head_dim": 128,
            "joint_attention_dim": 64,
        },
        ((16, 1, 8, 10), (16, 1, 12, 6)),
        _plain(64),
        any_length=True,
    ),
)

HUNYUAN_IMAGE = Architecture(
    "HunyuanImage-2.1",
    "HunyuanImage21",
    {
        "image_model": "hunyuan_video",
        "in_channels": 64,
        "patch_size": [1, 1],
        "out_channels": 64,
        "vec_in_dim": None,
        "axes_dim": [64, 64],
        "meanflow": False,
        "context_in_dim": 64,
        "hidden_size": 256,
        "mlp_ratio": 4.0,
        "num_heads": 2,
        "depth": 2,
        "depth_single_blocks": 2,
        "theta": 256,
        "qkv_bias": True,
        "byt5": True,
        "guidance_embed": False,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
    },
    ((64, 8, 6), (64, 6, 10)),
    _hunyuan,
    any_length=True,
)
"""Not in the table: the class of HunyuanVideo-1.5, with the words to be drawn in another place."""

LTX2 = Architecture(
    "LTX-2",
    "LTXAV",
    {
        "image_model": "ltxav",
        "num_layers": 3,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "cross_attention_dim": 128,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 32,
        "audio_cross_attention_dim": 64,
        "caption_channels": 48,
        "connector_num_attention_heads": 2,
        "connector_attention_head_dim": 24,
        "connector_num_layers": 1,
        "rope_type": "split",
        "frequencies_precision": "float64",
        "use_middle_indices_grid": True,
        "causal_temporal_positioning": True,
    },
    ((128, 3, 4, 6),),
    _plain(96),
)
"""Not in the table: its latent is a video and its sound, and ComfyUI 0.7 has no such model."""

MINIMAX_H3 = Architecture(
    "MiniMax H3",
    "MiniMaxH3",
    {
        "image_model": "minimax_h3",
        "hidden_size": 64,
        "num_layers": 2,
        "token_refiner_num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 128,
        "ffn_hidden_size": 96,
        "text_dim": 48,
        "timestep_input_dim": 32,
        "time_embed_hidden_size": 64,
        "time_embed_dim": 40,
    },
    ((24, 3, 4, 6),),
    _plain(48),
)
"""Not in the table, as LTX-2."""
