"""The models of Flux.1: dev, and schnell, which was distilled without guidance."""

from __future__ import annotations

import dataclasses

from comfy_tpu.families.flux import card, schedulers, text, transformer
from comfy_tpu.families.flux.lora import lora_names
from comfy_tpu.families.flux.single_files import SINGLE_FILES
from comfy_tpu.families.model_family import Denoiser, ModelFamily, Scheduling, TextEncoding
from comfy_tpu.families.shared.image_vae import IMAGE_VAE

FLUX_DEV = ModelFamily(
    card.FLUX_DEV,
    TextEncoding(text.ENCODERS, text.embedding_shapes),
    Denoiser(
        transformers=(transformer.TRANSFORMER,),
        prepare=transformer.prepare,
        predict=transformer.predict,
        lora_names=lora_names,
    ),
    IMAGE_VAE,
    Scheduling(schedulers.DEV_SCHEDULERS),
    single_files=SINGLE_FILES,
)
FLUX_SCHNELL = dataclasses.replace(
    FLUX_DEV, card=card.FLUX_SCHNELL, scheduling=Scheduling(schedulers.SCHNELL_SCHEDULERS)
)

MODELS = {family.name: family for family in (FLUX_DEV, FLUX_SCHNELL)}
