"""Small random Qwen-Image pipelines on disk, with every piece that the real model directories have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    BatchFeature,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families.small_flux import WORDS, random_weights
from tests.parity.small_models import temporary_directory

TRANSFORMER: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 6, 6),
}
VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.5, 0.8, 1.1, 2.0],
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_TOKEN = 2 + SPECIAL.index("<|image_pad|>")
QWEN_VL: dict[str, Any] = {
    "text_config": {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,  # which tp=4 does not divide, and two of keys
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "depth": 16,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 48,
        "window_size": 56,
        "fullatt_block_indexes": [7, 15],
    },
    "image_token_id": IMAGE_TOKEN,
    "vision_start_token_id": 2 + SPECIAL.index("<|vision_start|>"),
    "vision_end_token_id": 2 + SPECIAL.index("<|vision_end|>"),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words, signs and line ends, so that the templates have as many tokens as with the real one."""
    words = ("system", "user", "assistant", "describe", "the", "image", ":", "\n", "picture", "1", "2", *WORDS)
    known = {word: number for number, word in enumerate(("<pad>", "<unk>", *SPECIAL, *words))}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"'s|\),|\w+|\n|[^\w\s]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL),
        model_max_length=4096,
    )


class Processor:
    """transformers' own for Qwen2.5-VL, which needs torchvision for videos: tokens of a text and patches of images."""

    def __init__(self) -> None:
        self.tokenizer, self.image_processor = tokenizer(), image_processor()

    def __call__(self, *, text: list[str], images: Any, padding: bool, return_tensors: str) -> BatchFeature:
        given = images if isinstance(images, list) else [images]
        read = self.image_processor(images=given, return_tensors="pt")
        counts = iter((read["image_grid_thw"].prod(dim=1) // self.image_processor.merge_size**2).tolist())
        parts = text[0].split("<|image_pad|>")
        expanded = parts[0] + "".join("<|image_pad|>" * next(counts) + part for part in parts[1:])
        tokens = self.tokenizer([expanded], return_tensors="pt")
        return BatchFeature({**read, "input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask})


def image_processor() -> Any:
    return Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 1280)


def _say_kinds(module: torch.nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What diffusers 0.42 does not say to transformers 5 (huggingface/diffusers#14194): which tokens are an image's.
    Without it their rows and columns are lost."""
    return args, {"mm_token_type_ids": (given["input_ids"] == IMAGE_TOKEN).int(), **given}


@functools.cache
def reference(variant: str) -> Any:
    """ "image", "edit", "plus", or "2511"."""
    torch.manual_seed(0)
    common = {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        "vae": random_weights(AutoencoderKLQwenImage(**VAE)),
        "text_encoder": random_weights(Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**QWEN_VL))),
        "tokenizer": tokenizer(),
        "transformer": random_weights(QwenImageTransformer2DModel(**TRANSFORMER, zero_cond_t=variant == "2511")),
    }
    if variant == "image":
        pipeline = QwenImagePipeline(**common)
    else:
        common["text_encoder"].register_forward_pre_hook(_say_kinds, with_kwargs=True)
        pipeline = _PIPELINES[variant](**common, processor=Processor())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


_PIPELINES = {
    "image": QwenImagePipeline,
    "edit": QwenImageEditPipeline,
    "plus": QwenImageEditPlusPipeline,
    "2511": QwenImageEditPlusPipeline,
}


@functools.cache
def directory(variant: str) -> Path:
    path = temporary_directory()
    parts = {name: part for name, part in reference(variant).components.items() if name != "processor"}
    QwenImagePipeline(**parts).save_pretrained(path)
    if variant != "image":
        index = json.loads((path / "model_index.json").read_text())
        index |= {"_class_name": _PIPELINES[variant].__name__, "processor": ["transformers", "Qwen2VLProcessor"]}
        (path / "model_index.json").write_text(json.dumps(index))
        image_processor().save_pretrained(path / "processor")
    return path
