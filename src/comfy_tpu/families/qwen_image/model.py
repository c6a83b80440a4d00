"""The models of Qwen-Image: from a prompt, and the ones that edit images."""

from __future__ import annotations

import dataclasses
import functools

from comfy_tpu.families.model_family import Denoiser, ModelFamily, Scheduling, TextEncoder, TextEncoding, Vae
from comfy_tpu.families.qwen_image import card, image, schedulers, text, transformer, vae
from comfy_tpu.families.qwen_image.single_files import EDIT_FILES, SINGLE_FILES

QWEN_IMAGE = ModelFamily(
    card.QWEN_IMAGE,
    TextEncoding(text.ENCODERS, text.embedding_shapes),
    Denoiser(
        transformers=(transformer.TRANSFORMER,),
        prepare=transformer.prepare,
        predict=transformer.predict,
        guide=transformer.guide,
    ),
    Vae(
        component=vae.VAE,
        decode_frame=vae.decode_frame,
        latent_channels=vae.latent_channels,
        latent_statistics=vae.latent_statistics,
        encode_image=vae.encode_image,
    ),
    Scheduling(schedulers.SCHEDULERS, own_schedulers=schedulers.own_schedulers),
    single_files=SINGLE_FILES,
)

QWEN_IMAGE_EDIT = dataclasses.replace(
    QWEN_IMAGE,
    card=card.QWEN_IMAGE_EDIT,
    text=TextEncoding(
        (
            TextEncoder(
                text.EDIT_TEXT_ENCODER,
                text.encode_edit,
                tokenize=text.make_edit_tokenizer(numbers_images=False),
                read_images=text.make_image_reader(image.fit),
            ),
        ),
        functools.partial(image.embedding_shapes, image.VAE_AREA),
    ),
    vae=dataclasses.replace(QWEN_IMAGE.vae, encode_image=None, encode_frames=vae.encode_frames),
    media=image.REFERENCES,
    single_files=EDIT_FILES,
)
QWEN_IMAGE_EDIT_PLUS = dataclasses.replace(
    QWEN_IMAGE_EDIT,
    card=card.QWEN_IMAGE_EDIT_PLUS,
    text=TextEncoding(
        (
            TextEncoder(
                text.EDIT_TEXT_ENCODER,
                text.encode_edit,
                tokenize=text.make_edit_tokenizer(numbers_images=True),
                read_images=text.make_image_reader(image.shrink),
            ),
        ),
        functools.partial(image.embedding_shapes, image.SHOWN_AREA),
    ),
)

MODELS = {family.name: family for family in (QWEN_IMAGE, QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS)}
