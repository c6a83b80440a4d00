"""The models of Flux.2: dev, klein, and klein base, which has a branch for a negative prompt."""

from __future__ import annotations

import dataclasses

from comfy_tpu.families.flux2 import card, schedulers, text, transformer, vae
from comfy_tpu.families.flux2.image import REFERENCES
from comfy_tpu.families.flux2.lora import lora_names
from comfy_tpu.families.flux2.single_files import DEV_FILES, KLEIN_FILES
from comfy_tpu.families.model_family import Denoiser, ModelFamily, Scheduling, TextEncoding, Vae

_DENOISER = Denoiser(
    transformers=(transformer.TRANSFORMER,),
    prepare=transformer.prepare,
    predict=transformer.predict,
    lora_names=lora_names,
)

FLUX2_DEV = ModelFamily(
    card.FLUX2_DEV,
    TextEncoding((text.DEV_TEXT,), transformer.embedding_shapes),
    _DENOISER,
    Vae(
        component=vae.VAE,
        decode_frame=vae.decode_frame,
        latent_channels=vae.latent_channels,
        latent_statistics=vae.latent_statistics,
        encode_frames=vae.encode_frames,
    ),
    Scheduling(schedulers.SCHEDULERS),
    REFERENCES,
    DEV_FILES,
)
FLUX2_KLEIN = dataclasses.replace(
    FLUX2_DEV,
    card=card.FLUX2_KLEIN,
    text=TextEncoding((text.KLEIN_TEXT,), transformer.embedding_shapes),
    single_files=KLEIN_FILES,
)
FLUX2_KLEIN_BASE = dataclasses.replace(FLUX2_KLEIN, card=card.FLUX2_KLEIN_BASE)

MODELS = {family.name: family for family in (FLUX2_DEV, FLUX2_KLEIN, FLUX2_KLEIN_BASE)}
