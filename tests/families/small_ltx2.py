"""A small random LTX-2 and LTX-2.3 on disk, with every piece that the real model directory has."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from comfy_tpu.families.ltx2 import transformer as ltx2_transformer
from tests.families import small_ltx
from tests.families.small_flux import WORDS, random_weights
from tests.parity.small_models import SmallModel, small_model, temporary_directory

TEXT_TOKENS = 128
HEADS, HEAD_DIM, AUDIO_HEAD_DIM, TEXT, CHANNELS = 8, 14, 6, 16, 8
HIDDEN, AUDIO_HIDDEN = HEADS * HEAD_DIM, HEADS * AUDIO_HEAD_DIM
"""112, which six does not divide: as 4096, four features are not turned by RoPE."""

TRANSFORMER: dict[str, Any] = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "cross_attention_dim": HIDDEN,
    "audio_in_channels": CHANNELS,
    "audio_out_channels": CHANNELS,
    "audio_num_attention_heads": HEADS,
    "audio_attention_head_dim": AUDIO_HEAD_DIM,
    "audio_cross_attention_dim": AUDIO_HIDDEN,
    "num_layers": 3,
    "caption_channels": TEXT,
    "rope_type": "split",
    "perturbed_attn": True,
}
LATER: dict[str, Any] = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
}
"""What LTX-2.3 changed."""


@functools.cache
def transformer(*, later: bool = False, rope_type: str = "split") -> SmallModel:
    config = TRANSFORMER | {"rope_type": rope_type} | (LATER if later else {})
    spec = ltx2_transformer.MODULATED_TRANSFORMER if later else ltx2_transformer.TRANSFORMER
    return small_model(spec, config, lambda: LTX2VideoTransformer3DModel(**config))


VAE: dict[str, Any] = {
    "latent_channels": CHANNELS,
    "block_out_channels": (8, 8, 16, 16),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "scaling_factor": 0.9,
    "decoder_causal": False,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}
AUDIO_VAE: dict[str, Any] = {
    "base_channels": CHANNELS,
    "ch_mult": (1, 2, 2),
    "num_res_blocks": 1,
    "latent_channels": 2,
    "mel_bins": 16,
}
"""Two channels of four bins are the features of a token."""
VOCODER: dict[str, Any] = {
    "in_channels": 32,
    "hidden_channels": 16,
    "upsample_kernel_sizes": [16, 12],
    "upsample_factors": [10, 8],
    "resnet_kernel_sizes": [3, 5],
    "resnet_dilations": [[1, 3], [1, 3]],
    "output_sampling_rate": 8000,
}
"""Eighty samples of a column of a spectrogram, of which a second has a hundred."""
GEMMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": TEXT,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
CONNECTORS: dict[str, Any] = {
    "caption_channels": TEXT,
    "text_proj_in_factor": GEMMA["num_hidden_layers"] + 1,
    "video_connector_num_attention_heads": 2,
    "video_connector_attention_head_dim": TEXT // 2,
    "audio_connector_num_attention_heads": 2,
    "audio_connector_attention_head_dim": TEXT // 2,
    "rope_type": "split",
}


LATER_VAE: dict[str, Any] = {
    **VAE,
    "decoder_block_out_channels": (8, 16, 16, 32),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "decoder_spatio_temporal_scaling": (True, True, True, True),
    "decoder_inject_noise": (False, False, False, False, False),
    "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    "upsample_residual": (False, False, False, False),
    "upsample_factor": (2, 2, 1, 2),
    "decoder_spatial_padding_mode": "zeros",
}
LATER_CONNECTORS: dict[str, Any] = {
    **CONNECTORS,
    "video_connector_num_attention_heads": HEADS,
    "video_connector_attention_head_dim": HEAD_DIM,
    "video_connector_num_layers": 3,
    "video_gated_attn": True,
    "audio_connector_num_attention_heads": HEADS,
    "audio_connector_attention_head_dim": AUDIO_HEAD_DIM,
    "audio_connector_num_layers": 3,
    "audio_gated_attn": True,
    "per_modality_projections": True,
    "video_hidden_dim": HIDDEN,
    "audio_hidden_dim": AUDIO_HIDDEN,
    "proj_bias": True,
}
LATER_VOCODER: dict[str, Any] = {
    **{name: value for name, value in VOCODER.items() if name != "output_sampling_rate"},
    "bwe_in_channels": 16,
    "bwe_hidden_channels": 16,
    "bwe_upsample_kernel_sizes": [16, 8],
    "bwe_upsample_factors": [10, 4],
    "bwe_resnet_kernel_sizes": [3, 5],
    "bwe_resnet_dilations": [[1, 3], [1, 3]],
    "filter_length": 32,
    "hop_length": 20,
    "window_length": 32,
    "num_mel_channels": 8,
    "input_sampling_rate": 8000,
    "output_sampling_rate": 16000,
}
"""Forty samples of a column of the second spectrogram, whose columns are twenty samples of the first waveform."""


def _with_statistics(model: Any) -> Any:
    count = len(model.latents_mean)
    model.latents_mean.copy_(torch.linspace(-0.5, 0.5, count).bfloat16())
    model.latents_std.copy_(torch.linspace(0.5, 1.5, count).bfloat16())
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    known = {word: number for number, word in enumerate(("<pad>", "<unk>", "<bos>", *WORDS))}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", padding_side="left"
    )


def _loud_vocoder() -> Any:
    """A random one whispers."""
    model: Any = random_weights(LTX2Vocoder(**VOCODER))
    model.conv_out.weight.mul_(16)
    return model


def _loud_wideband_vocoder() -> Any:
    """With the windowed Fourier basis and the bands that a published one has as weights."""
    model: Any = random_weights(LTX2VocoderWithBWE(**LATER_VOCODER))
    for part in (model.vocoder, model.bwe_generator):
        part.conv_out.weight.mul_(16)
    length, bands = LATER_VOCODER["filter_length"], LATER_VOCODER["num_mel_channels"]
    places = torch.arange(length // 2 + 1)
    angles = 2 * torch.pi * places.unsqueeze(1) * torch.arange(length) / length
    basis = torch.cat((angles.cos(), -angles.sin())) * torch.hann_window(length)
    model.mel_stft.stft_fn.forward_basis.copy_(basis.unsqueeze(1).bfloat16())
    middles = torch.linspace(1, length // 2 - 1, bands)
    model.mel_stft.mel_basis.copy_((1 - (places - middles.unsqueeze(1)).abs() / 3).clamp(min=0).bfloat16())
    return model


def reference(*, later: bool = False) -> LTX2Pipeline:
    return _reference(later)  # one cache entry, whether `later` is named or not


@functools.cache
def _reference(later: bool) -> LTX2Pipeline:
    torch.manual_seed(0)
    gemma = Gemma3Config(text_config=GEMMA, vision_config=VISION, mm_tokens_per_image=4)
    pipeline = LTX2Pipeline(
        scheduler=small_ltx.scheduler(),
        vae=_with_statistics(random_weights(AutoencoderKLLTX2Video(**(LATER_VAE if later else VAE)))),
        audio_vae=_with_statistics(random_weights(AutoencoderKLLTX2Audio(**AUDIO_VAE))),
        text_encoder=random_weights(Gemma3ForConditionalGeneration(gemma)),
        tokenizer=tokenizer(),
        connectors=random_weights(LTX2TextConnectors(**(LATER_CONNECTORS if later else CONNECTORS))),
        transformer=transformer(later=later).reference,
        vocoder=_loud_wideband_vocoder() if later else _loud_vocoder(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def image_reference(*, later: bool = False) -> LTX2ImageToVideoPipeline:
    pipeline = LTX2ImageToVideoPipeline(**reference(later=later).components)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@functools.cache
def directory(*, later: bool = False) -> Path:
    path = temporary_directory()
    reference(later=later).save_pretrained(path)
    return path
