"""Small VAEs with random weights, put together by ComfyUI's own code for the real ones, widths excepted."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.native.architectures import fill

if TYPE_CHECKING:
    from comfy.sd import VAE


@dataclasses.dataclass(frozen=True, eq=False)
class SmallVae:
    name: str
    """Of the models that use it."""
    home: str
    """Where ComfyUI's VAE class finds the module's class, whose widths are fixed there."""
    arguments: dict[str, Any]
    latent: tuple[int, ...]
    """[channels, …], large enough for several tiles of 64 pixels."""
    frames: int = 1
    """Of the video that the latent is."""
    ratio: int = 8

    def build(self, seed: int = 0) -> VAE:
        import comfy.sd

        home, _, name = self.home.rpartition(".")
        owner = importlib.import_module(home)
        module = getattr(owner, name)(**self.arguments)
        fill(module, seed)
        with pytest.MonkeyPatch.context() as patch:
            # Everything else about it is decided by ComfyUI, from the state dict.
            patch.setattr(owner, name, lambda *args, **kwargs: module)
            return comfy.sd.VAE(sd=module.state_dict())

    def latents(self, batch: int = 1) -> torch.Tensor:
        return torch.randn(batch, *self.latent, generator=torch.Generator().manual_seed(2))

    def images(self) -> torch.Tensor:
        height, width = (side * self.ratio for side in self.latent[-2:])
        return torch.rand(self.frames, height, width, 3, generator=torch.Generator().manual_seed(3))

    @property
    def is_video(self) -> bool:
        return len(self.latent) == 4


_CONFIG = {
    "double_z": True,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
}
_WAN = {
    "dim": 8,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
}


def _engine(path: str, config: dict[str, Any], regularizer: str = "DiagonalGaussianRegularizer") -> dict[str, Any]:
    return {
        "regularizer_config": {"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
        "encoder_config": {"target": f"{path}.Encoder", "params": config},
        "decoder_config": {"target": f"{path}.Decoder", "params": config},
    }


_MODEL = "comfy.ldm.modules.diffusionmodules.model"
_HUNYUAN = {
    "block_out_channels": [32, 32, 64, 64, 64],
    "in_channels": 3,
    "out_channels": 3,
    "num_res_blocks": 1,
    "ffactor_spatial": 16,
    "ffactor_temporal": 4,
    "downsample_match_channel": True,
    "upsample_match_channel": True,
    "z_channels": 32,
}

VAES = (
    SmallVae("Wan 2.1", "comfy.ldm.wan.vae.WanVAE", {**_WAN, "z_dim": 16, "image_channels": 3}, (16, 3, 8, 12), 9),
    SmallVae("Wan 2.2 5B", "comfy.ldm.wan.vae2_2.WanVAE", {**_WAN, "dec_dim": 8, "z_dim": 48}, (48, 3, 4, 6), 9, 16),
    SmallVae("Qwen-Image", "comfy.ldm.wan.vae.WanVAE", {**_WAN, "z_dim": 16, "image_channels": 3}, (16, 1, 8, 12)),
    SmallVae(
        "SDXL",
        "comfy.sd.AutoencoderKL",
        {"ddconfig": {**_CONFIG, "z_channels": 4}, "embed_dim": 4},
        (4, 8, 12),
    ),
    SmallVae(
        "SD3.5, Flux.1", "comfy.sd.AutoencodingEngine", _engine(_MODEL, {**_CONFIG, "z_channels": 16}), (16, 8, 12)
    ),
    SmallVae(
        "Flux.2",
        "comfy.sd.AutoencoderKL",
        {"ddconfig": {**_CONFIG, "z_channels": 32, "batch_norm_latent": True}, "embed_dim": 32},
        (128, 4, 6),
        1,
        16,
    ),
    SmallVae(
        "HunyuanVideo-1.5",
        "comfy.sd.AutoencodingEngine",
        _engine("comfy.ldm.hunyuan_video.vae_refiner", _HUNYUAN, "EmptyRegularizer"),
        (32, 3, 4, 6),
        9,
        16,
    ),
)
