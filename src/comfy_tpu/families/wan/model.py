"""The models of Wan: a transformer for text, for images, or a pair of them for high and low noise; and the 5B, with a
VAE of its own."""

from __future__ import annotations

import dataclasses

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.families.model_family import Denoiser, ModelFamily, Scheduling, TextEncoder, TextEncoding, Vae
from comfy_tpu.families.shared.schedulers import FLOW_SCHEDULERS, own_shift
from comfy_tpu.families.wan import animate, animate_media, card, image, text, transformer, vace, vace_control, vae
from comfy_tpu.families.wan.lora import lora_names
from comfy_tpu.families.wan.nnx_vae import nnx_functions
from comfy_tpu.families.wan.single_files import SINGLE_FILES
from comfy_tpu.families.wan.video_to_video import VIDEO_ENCODING

_TEXT = TextEncoding(
    encoders=(TextEncoder(text.TEXT_ENCODER, text.encode_prompt, zeroes_padding=True),),
    embedding_shapes=text.embedding_shapes,
    clean_prompt=text.clean_prompt,
)
_TEXT_AND_IMAGE = dataclasses.replace(_TEXT, embedding_shapes=image.image_shapes)

_DENOISER = Denoiser(
    transformers=(transformer.TRANSFORMER,),
    prepare=transformer.prompt_cache,
    prepared_axes=transformer.PROMPT_AXES,
    predict=transformer.predict,
    merges_padding=True,
    token_grid=transformer.token_grid,
    lora_names=lora_names,
)
_IMAGE_DENOISER = dataclasses.replace(
    _DENOISER,
    transformers=(image.TRANSFORMER,),
    prepare=image.prompt_cache,
    prepared_axes=image.PROMPT_AXES,
    predict=image.predict,
    frame_inputs=("condition",),
)

_VAE = Vae(
    component=vae.VAE,
    decode_frame=vae.decode_frame,
    latent_channels=vae.latent_channels,
    latent_statistics=vae.latent_statistics,
    encode_frames=vae.encode_frames,
    other_backends={"nnx": nnx_functions},
)
_VAE_5B = dataclasses.replace(_VAE, latent_channels=lambda config: int(config.get("z_dim", 48)))

_SCHEDULING = Scheduling(FLOW_SCHEDULERS)
_OWN_SHIFT = Scheduling(FLOW_SCHEDULERS, own_settings=own_shift)
"""Schedulers with the shift of the model directory: each size has its own model."""


def _with_low_noise(spec: ComponentSpec) -> tuple[ComponentSpec, ComponentSpec]:
    return spec, dataclasses.replace(spec, name="transformer_2")


WAN21 = ModelFamily(card.WAN21, _TEXT, _DENOISER, _VAE, _SCHEDULING, VIDEO_ENCODING, SINGLE_FILES)
WAN21_IMAGE = ModelFamily(
    card.WAN21_IMAGE,
    _TEXT_AND_IMAGE,
    _IMAGE_DENOISER,
    _VAE,
    _OWN_SHIFT,
    image.LATENT_AND_CLIP_ENCODING,
    SINGLE_FILES,
)
WAN21_FIRST_LAST = dataclasses.replace(
    WAN21_IMAGE,
    card=card.WAN21_FIRST_LAST,
    denoiser=dataclasses.replace(_IMAGE_DENOISER, transformers=(image.FIRST_AND_LAST,)),
)
WAN22 = dataclasses.replace(
    WAN21,
    card=card.WAN22,
    denoiser=dataclasses.replace(
        _DENOISER,
        transformers=_with_low_noise(transformer.TRANSFORMER),
    ),
    media=None,
)
WAN22_IMAGE = dataclasses.replace(
    WAN22,
    card=card.WAN22_IMAGE,
    text=_TEXT_AND_IMAGE,
    denoiser=dataclasses.replace(
        _IMAGE_DENOISER,
        transformers=_with_low_noise(transformer.TRANSFORMER),
    ),
    media=image.LATENT_ENCODING,
)
WAN22_5B = ModelFamily(
    card.WAN22_5B,
    _TEXT,
    dataclasses.replace(
        _DENOISER,
        prepare=image.prepare_first_frame,
        prepared_axes={**transformer.PROMPT_AXES, "condition": ("dp",)},
        predict=image.predict_first_frame,
    ),
    _VAE_5B,
    _OWN_SHIFT,
    image.FIRST_FRAME_ENCODING,
    SINGLE_FILES,
)

WAN_VACE = ModelFamily(
    card.WAN_VACE,
    dataclasses.replace(_TEXT, embedding_shapes=vace_control.embedding_shapes),
    dataclasses.replace(
        _DENOISER,
        transformers=(vace.TRANSFORMER,),
        prepare=vace.prepare,
        prepared_axes=vace.PROMPT_AXES,
        predict=vace.predict,
        frame_inputs=("control",),
    ),
    _VAE,
    _SCHEDULING,
    vace_control.CONTROL_ENCODING,
    SINGLE_FILES,
)
WAN22_VACE = dataclasses.replace(
    WAN_VACE,
    card=card.WAN22_VACE,
    denoiser=dataclasses.replace(WAN_VACE.denoiser, transformers=_with_low_noise(vace.TRANSFORMER)),
)

WAN_ANIMATE = ModelFamily(
    card.WAN_ANIMATE,
    dataclasses.replace(_TEXT, embedding_shapes=animate_media.embedding_shapes),
    dataclasses.replace(
        _DENOISER,
        transformers=(animate.TRANSFORMER,),
        prepare=animate.prepare,
        prepared_axes=animate.PROMPT_AXES,
        predict=animate.predict,
        negative_values={"face": 0},  # a black face
    ),
    _VAE,
    _SCHEDULING,
    animate_media.ANIMATE_ENCODING,
    SINGLE_FILES,
)

MODELS = {
    family.name: family
    for family in (
        *(WAN21, WAN21_IMAGE, WAN21_FIRST_LAST, WAN22, WAN22_IMAGE, WAN22_5B),
        *(WAN_VACE, WAN22_VACE, WAN_ANIMATE),
    )
}
