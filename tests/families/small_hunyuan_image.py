"""HunyuanVideo-1.5 from an image, in small: the parts of small_hunyuan.py, and SigLIP."""

import functools
from pathlib import Path

from diffusers import HunyuanVideo15ImageToVideoPipeline
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from comfy_tpu.families.hunyuan_video import image as hunyuan_image
from tests.families import small_hunyuan
from tests.parity.small_models import SmallModel, small_model, temporary_directory


@functools.cache
def image_encoder() -> SmallModel:
    config = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    return small_model(hunyuan_image.IMAGE_ENCODER, config, lambda: SiglipVisionModel(SiglipVisionConfig(**config)))


@functools.cache
def reference() -> HunyuanVideo15ImageToVideoPipeline:
    text = small_hunyuan.reference()
    parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2", "transformer", "vae", "scheduler", "guider")
    pipeline = HunyuanVideo15ImageToVideoPipeline(
        **{part: getattr(text, part) for part in parts},
        image_encoder=image_encoder().reference,
        feature_extractor=SiglipImageProcessor(size={"height": 28, "width": 28}),
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.tokenizer_max_length = small_hunyuan.TEXT_TOKENS
    return pipeline


@functools.cache
def directory() -> Path:
    path = temporary_directory()
    reference().save_pretrained(path)
    return path
