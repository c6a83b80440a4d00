"""Small random Flux pipelines on disk, with every piece that the real model directories have."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from tests.parity.small_models import temporary_directory

WORDS = ("a", "red", "blue", "circle", "moving", "left", "right", "on", "black", "background")

TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
CLIP: dict[str, Any] = {
    "vocab_size": 14,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,  # as the real one's twelve, a number that eight devices do not divide
    "max_position_embeddings": 77,
    "eos_token_id": 2,  # as in the real one, where it is wrong: the end is the token with the highest number
    "bos_token_id": 0,
    "pad_token_id": 1,
    "hidden_act": "quick_gelu",
}
T5: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 8,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def random_weights(module: torch.nn.Module) -> torch.nn.Module:
    module.eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.ndim == 1 or not parameter.any():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms that do something
        parameter.copy_(parameter.bfloat16())
    return module


def _tokenizer(vocabulary: list[str], template: str, length: int, **special: str) -> PreTrainedTokenizerFast:
    numbers = {word: index for index, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    used = [(word, numbers[word]) for word in template.split() if word != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", model_max_length=length, **special)


def _clip_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<start>", "<unk>", *WORDS, "<more>", "<end>"]
    return _tokenizer(words, "<start> $A <end>", 77, bos_token="<start>", eos_token="<end>", pad_token="<end>")


def t5_tokenizer() -> PreTrainedTokenizerFast:
    return _tokenizer(["<pad>", "</s>", "<unk>", *WORDS], "$A </s>", 512, eos_token="</s>", pad_token="<pad>")


@functools.cache
def reference(variant: str) -> FluxPipeline:
    """ "dev" or "schnell"."""
    torch.manual_seed(0)
    dev = variant == "dev"
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0 if dev else 1.0,
            use_dynamic_shifting=dev,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        ),
        vae=random_weights(AutoencoderKL(**VAE)),
        text_encoder=random_weights(CLIPTextModel(CLIPTextConfig(**CLIP))),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=random_weights(T5EncoderModel(T5Config(**T5))),
        tokenizer_2=t5_tokenizer(),
        transformer=random_weights(FluxTransformer2DModel(**TRANSFORMER, guidance_embeds=dev)),
    )


@functools.cache
def directory(variant: str) -> Path:
    path = temporary_directory()
    reference(variant).save_pretrained(path)
    return path
