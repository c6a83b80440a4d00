"""The model of LTX-Video: from a prompt, and from a first frame."""

from __future__ import annotations

from comfy_tpu.families.ltx_video import card, text, transformer, vae
from comfy_tpu.families.ltx_video.lora import lora_names
from comfy_tpu.families.ltx_video.single_files import SINGLE_FILES
from comfy_tpu.families.media import first_frame_clips
from comfy_tpu.families.model_family import Denoiser, MediaEncoding, ModelFamily, Scheduling, TextEncoding
from comfy_tpu.families.shared import all_frames_vae, first_frame
from comfy_tpu.families.shared import terminal_shift_schedulers as schedulers

LTX_VIDEO = ModelFamily(
    card.LTX_VIDEO,
    TextEncoding((text.ENCODER,), text.embedding_shapes),
    Denoiser(
        transformers=(transformer.TRANSFORMER,),
        prepare=transformer.prepare,
        prepared_axes=transformer.PROMPT_AXES,
        predict=transformer.predict,
        token_grid=transformer.token_grid,
        settings_inputs=transformer.settings_inputs,
        lora_names=lora_names,
    ),
    all_frames_vae.make_vae(vae.VAE),
    Scheduling(schedulers.SCHEDULERS, own_schedulers=schedulers.own_schedulers),
    MediaEncoding(
        first_frame_clips,
        first_frame.condition,
        optional_embeddings=("condition",),
        finish=first_frame.finish,
    ),
    SINGLE_FILES,
)

MODELS = {LTX_VIDEO.name: LTX_VIDEO}
