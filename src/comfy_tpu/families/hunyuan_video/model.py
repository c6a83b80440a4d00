"""The models of HunyuanVideo-1.5: from a prompt, and from a first frame."""

from __future__ import annotations

import dataclasses
from typing import Any

from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.hunyuan_video import card, image, text, transformer, vae
from comfy_tpu.families.hunyuan_video.lora import lora_names
from comfy_tpu.families.hunyuan_video.single_files import SINGLE_FILES
from comfy_tpu.families.model_family import Denoiser, ModelFamily, ReadJson, Scheduling, TextEncoding, Vae
from comfy_tpu.families.shared.schedulers import dpm, euler_from_one, own_shift, unipc


def own_settings(read: ReadJson) -> dict[str, Any]:
    """The shift of the model's scheduler and the scale of its guider, which differ between 480p and 720p."""
    chosen = own_shift(read)
    if guider := read("guider/guider_config.json"):
        plain = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
        other = [name for name, value in plain.items() if guider.get(name, value) != value]
        if guider.get("_class_name") != "ClassifierFreeGuidance" or other:
            raise UnsupportedError(
                f"the model's guider is a {guider.get('_class_name')} with {', '.join(other) or 'its own rules'}; "
                "supported is ClassifierFreeGuidance with a guidance_scale alone"
            )
        chosen["guidance_scale"] = float(guider.get("guidance_scale", 7.5)) if guider.get("enabled", True) else 1.0
    return chosen


HUNYUAN15 = ModelFamily(
    card.HUNYUAN15,
    TextEncoding(text.TEXT_ENCODERS, transformer.embedding_shapes),
    Denoiser(
        transformers=(transformer.TRANSFORMER,),
        prepare=transformer.prepare,
        predict=transformer.predict,
        token_grid=transformer.token_grid,
        lora_names=lora_names,
    ),
    Vae(
        component=vae.VAE,
        decode_frame=vae.decode_frame,
        latent_channels=vae.latent_channels,
        latent_statistics=vae.latent_statistics,
        first_cache=vae.first_cache,
    ),
    Scheduling({"euler": euler_from_one, "unipc": unipc, "dpm++": dpm}, own_settings=own_settings),
    single_files=SINGLE_FILES,
)
HUNYUAN15_IMAGE = dataclasses.replace(
    HUNYUAN15,
    card=card.HUNYUAN15_IMAGE,
    text=TextEncoding(text.TEXT_ENCODERS, image.embedding_shapes),
    denoiser=dataclasses.replace(HUNYUAN15.denoiser, frame_inputs=("condition",)),
    vae=dataclasses.replace(HUNYUAN15.vae, component=image.IMAGE_VAE, encode_frames=image.encode_frames),
    media=image.FIRST_FRAME,
)

MODELS = {family.name: family for family in (HUNYUAN15, HUNYUAN15_IMAGE)}
