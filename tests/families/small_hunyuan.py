"""A small random HunyuanVideo-1.5 on disk, with every piece a real model directory has."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

from comfy_tpu.families.hunyuan_video import text as hunyuan_text
from comfy_tpu.families.hunyuan_video import transformer as hunyuan_transformer
from comfy_tpu.families.hunyuan_video import vae as hunyuan_vae
from tests.parity.small_models import SmallModel, small_model, temporary_directory

WORDS = ("a", "red", "blue", "circle", "square", "moving", "left", "right", "on", "black", "background", "says")
TEXT_TOKENS = 24
GUIDANCE_SCALE = 4.0
SHIFT = 3.0

# Words before the prompt: 16 here, 90 of the system message and two roles, as many as the real template has tokens.
_TEMPLATE = (
    "{{ 'on ' * 16 }}"
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", "assistant", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        chat_template=_TEMPLATE,
        model_max_length=4096,
    )


@functools.cache
def transformer() -> SmallModel:
    config = {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 8,
        "attention_head_dim": 12,
        "num_layers": 3,
        "num_refiner_layers": 2,
        "mlp_ratio": 2.0,
        "text_embed_dim": 48,
        "text_embed_2_dim": 24,
        "image_embed_dim": 16,
        "rope_axes_dim": (4, 4, 4),
        "target_size": 64,
        "task_type": "t2v",
    }
    return small_model(hunyuan_transformer.TRANSFORMER, config, lambda: HunyuanVideo15Transformer3DModel(**config))


@functools.cache
def text_encoder() -> SmallModel:
    """Six heads, which tp=4 does not divide: as 28 and tp=8."""
    config = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
    }
    return small_model(
        hunyuan_text.TEXT_ENCODER, config, lambda: Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**_copied(config)))
    )


@functools.cache
def glyph_encoder() -> SmallModel:
    config = {
        "vocab_size": 384,
        "d_model": 24,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 3,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    return small_model(hunyuan_text.GLYPH_ENCODER, config, lambda: T5EncoderModel(T5Config(**config)))


@functools.cache
def vae() -> SmallModel:
    config = {"latent_channels": 4, "block_out_channels": (8, 8, 16, 16, 16), "layers_per_block": 1}
    return small_model(hunyuan_vae.VAE, config, lambda: AutoencoderKLHunyuanVideo15(**config))


def _copied(config: dict[str, Any]) -> dict[str, Any]:
    """transformers writes into what it is given."""
    return {**config, "rope_parameters": dict(config["rope_parameters"])}


@functools.cache
def reference() -> HunyuanVideo15Pipeline:
    pipeline = HunyuanVideo15Pipeline(
        tokenizer=tokenizer(),
        text_encoder=text_encoder().reference,
        tokenizer_2=ByT5Tokenizer(),
        text_encoder_2=glyph_encoder().reference,
        transformer=transformer().reference,
        vae=vae().reference,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        guider=ClassifierFreeGuidance(guidance_scale=GUIDANCE_SCALE),
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.tokenizer_max_length = TEXT_TOKENS
    pipeline.vision_num_semantic_tokens = 5
    return pipeline


@functools.cache
def directory() -> Path:
    path = temporary_directory()
    reference().save_pretrained(path)
    return path
