"""A small random Wan pipeline on disk, with every piece a real model directory has."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from diffusers import UniPCMultistepScheduler, WanPipeline
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.parity import small_models

WORDS = ("a", "red", "blue", "circle", "moving", "left", "right", "on", "black", "background")


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


@functools.cache
def reference() -> WanPipeline:
    text_encoder = small_models.text_encoder(d_model=16).reference
    return WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=text_encoder,
        transformer=small_models.transformer().reference,
        vae=small_models.vae(levels=4).reference,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )


@functools.cache
def directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="comfy-tpu-"))
    reference().save_pretrained(path)
    return path


def with_scheduler(scheduler: Any) -> WanPipeline:
    parts = ("tokenizer", "text_encoder", "transformer", "vae")
    return WanPipeline(**{part: getattr(reference(), part) for part in parts}, scheduler=scheduler)
