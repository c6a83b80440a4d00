"""The models of LTX-2: a video and its sound, from a prompt, or from a first frame."""

from __future__ import annotations

import dataclasses

from comfy_tpu.families.ltx2 import card, guidance, text, transformer, vae
from comfy_tpu.families.ltx2.image import fit_frame
from comfy_tpu.families.ltx2.lora import lora_names
from comfy_tpu.families.ltx2.sound import SOUND, WIDEBAND_SOUND
from comfy_tpu.families.media import first_frame_clips
from comfy_tpu.families.model_family import Denoiser, MediaEncoding, ModelFamily, Scheduling, TextEncoding
from comfy_tpu.families.shared import all_frames_vae, first_frame
from comfy_tpu.families.shared import terminal_shift_schedulers as schedulers
from comfy_tpu.families.shared.schedulers import euler_from_one

LTX2 = ModelFamily(
    card.LTX2,
    TextEncoding(text.ENCODERS, text.embedding_shapes),
    Denoiser(
        transformers=(transformer.TRANSFORMER,),
        prepare=transformer.prepare,
        prepared_axes=transformer.PREPARED_AXES,
        predict=transformer.predict,
        settings_inputs=guidance.settings_inputs,
        extra_branches=guidance.extra_branches,
        guide=guidance.guide,
        lora_names=lora_names,
    ),
    all_frames_vae.make_vae(vae.VAE),
    Scheduling({**schedulers.SCHEDULERS, "euler-trailing": euler_from_one}, own_schedulers=schedulers.own_schedulers),
    MediaEncoding(
        first_frame_clips,
        first_frame.condition,
        optional_embeddings=("condition",),
        fit_frame=fit_frame,
        finish=first_frame.finish,
    ),
    sound=SOUND,
)

LTX23 = dataclasses.replace(
    LTX2,
    card=card.LTX23,
    denoiser=dataclasses.replace(LTX2.denoiser, transformers=(transformer.MODULATED_TRANSFORMER,)),
    sound=WIDEBAND_SOUND,
)

MODELS = {model.name: model for model in (LTX2, LTX23)}
