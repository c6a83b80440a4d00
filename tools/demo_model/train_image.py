"""The sibling that begins with an image: image encoder and transformer, on the text encoder and VAE that are there.

Wan 2.1's way: the latents of the first frame and of gray ones behind it, and a mask of what is given, are channels
beside the noise; CLIP's tokens are read by every block.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from transformers import CLIPVisionModel, UMT5EncoderModel

from tools.demo_model.model import new_image_encoder, new_image_transformer
from tools.demo_model.shortcuts import encode_latents
from tools.demo_model.train_video import Trainer, VideoTraining


@dataclass(frozen=True)
class ImageTraining(VideoTraining):
    steps: int = 12_000
    centred: float = 0.5
    seed: int = 2


class ImageToVideo(nn.Module):
    def __init__(self, text_encoder: UMT5EncoderModel, layers: int) -> None:
        super().__init__()
        self.text_encoder = text_encoder.requires_grad_(False)
        self.image_encoder = new_image_encoder()
        self.transformer = new_image_transformer(layers)

    def forward(self, noisy: Tensor, timestep: Tensor, tokens: Tensor, condition: Tensor, image: Tensor) -> Tensor:
        mask = (tokens != 0).long()
        embeds = self.text_encoder(tokens, mask).last_hidden_state * mask[..., None]
        seen = self.image_encoder(image / 127.5 - 1, output_hidden_states=True).hidden_states[-2]
        given = torch.zeros_like(condition[:, :4])
        given[:, :, 0] = 1
        noisy = torch.cat((noisy, given, condition), dim=1)
        return self.transformer(noisy, timestep, embeds, seen, return_dict=False)[0]


class ImageTrainer(Trainer):
    def __init__(
        self, settings: ImageTraining, vae: AutoencoderKLWan, text_encoder: UMT5EncoderModel, device: str, scratch: Path
    ) -> None:
        self.text_encoder = text_encoder
        super().__init__(settings, vae, device, scratch)

    def _new_model(self) -> nn.Module:
        return ImageToVideo(self.text_encoder, self.settings.layers)

    def _trained_parts(self, model: Path) -> dict[str, nn.Module]:
        return {
            "image_encoder": CLIPVisionModel.from_pretrained(model / "image_encoder"),
            "transformer": WanTransformer3DModel.from_pretrained(model / "transformer"),
        }

    def _encode(self, vae: AutoencoderKLWan, video: Tensor) -> dict[str, Tensor]:
        image = (video[:, :, 0] * 255).round()
        given = torch.full_like(video, 0.5)
        given[:, :, 0] = image / 255
        return {
            **super()._encode(vae, video),
            "condition": encode_latents(vae, given).bfloat16().contiguous(),
            "image": image.to(torch.uint8),
        }
