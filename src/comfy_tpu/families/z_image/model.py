"""The models of Z-Image: Turbo, distilled to eight steps without guidance, and the model that it was distilled from."""

from __future__ import annotations

import dataclasses

from comfy_tpu.families.model_family import Denoiser, ModelFamily, Scheduling, TextEncoding
from comfy_tpu.families.shared.image_vae import IMAGE_VAE
from comfy_tpu.families.z_image import card, schedulers, text, transformer
from comfy_tpu.families.z_image.lora import lora_names
from comfy_tpu.families.z_image.single_files import SINGLE_FILES

Z_IMAGE_TURBO = ModelFamily(
    card.Z_IMAGE_TURBO,
    TextEncoding(text.ENCODERS, text.embedding_shapes),
    Denoiser(
        transformers=(transformer.TRANSFORMER,),
        prepare=transformer.prepare,
        predict=transformer.predict,
        settings_inputs=transformer.settings_inputs,
        guide=transformer.guide,
        lora_names=lora_names,
    ),
    IMAGE_VAE,
    Scheduling(schedulers.SCHEDULERS, own_schedulers=schedulers.own_schedulers, own_settings=schedulers.own_settings),
    single_files=SINGLE_FILES,
)
Z_IMAGE = dataclasses.replace(Z_IMAGE_TURBO, card=card.Z_IMAGE)

MODELS = {family.name: family for family in (Z_IMAGE_TURBO, Z_IMAGE)}
