"""The parts of the demo model: the Wan 2.1 architecture in small, and the directory they are saved in."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from tools.demo_model.captions import vocabulary

LATENT_CHANNELS = 16
TEXT_WIDTH = 128
VOCABULARY_SIZE = 128  # 108 are used; a multiple of 8, so that the table can be sharded
FLOW_SHIFT = 3.0  # of training and of the saved scheduler
# As Wan: what diffusers keeps in float32 when it loads the model as bfloat16 (`_keep_in_fp32_modules`).
FLOAT32_PARTS = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")


def new_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,  # measured after training
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def new_transformer(layers: int = 6) -> WanTransformer3DModel:
    """Eight heads, because meshes up to tp=8 are tested on it. Six layers: 15 MB as saved, the limit is 16."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=8,
        attention_head_dim=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=256,
        ffn_dim=1024,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.zeros_(transformer.proj_out.weight)  # the first prediction is zero, not noise
    return transformer


def new_text_encoder() -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=VOCABULARY_SIZE,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=256,
            num_layers=2,
            num_heads=8,
            dropout_rate=0.0,
        )
    )


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of the grammar, lower-cased; T5's ids: 0 pads, 1 ends, 2 is a word it does not know."""
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )


def new_scheduler() -> UniPCMultistepScheduler:
    """The settings of Wan 2.1's own scheduler_config.json."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=FLOW_SHIFT,
        num_train_timesteps=1000,
    )


def save(
    directory: Path, vae: AutoencoderKLWan, text_encoder: UMT5EncoderModel, transformer: WanTransformer3DModel
) -> None:
    """Write the diffusers directory: the transformer and the text encoder as bfloat16, what Wan keeps in float32 so."""
    transformer = _as_bfloat16(transformer, except_in=FLOAT32_PARTS)
    text_encoder = _as_bfloat16(text_encoder, except_in=())
    pipeline = WanPipeline(
        tokenizer=new_tokenizer(),
        text_encoder=text_encoder,
        transformer=transformer,
        vae=vae,
        scheduler=new_scheduler(),
    )
    pipeline.save_pretrained(directory, safe_serialization=True)
    # transformers 5 writes the name of its own backend class, which transformers 4 does not know.
    _rewrite(directory / "model_index.json", tokenizer=["transformers", "PreTrainedTokenizerFast"])
    _rewrite(directory / "tokenizer" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    _rewrite(directory / "vae" / "config.json")


def load(directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> WanPipeline:
    pipeline = WanPipeline.from_pretrained(directory, dtype=dtype, local_files_only=True)
    pipeline.vae.float()  # as everybody runs Wan
    return pipeline.to(device)


def _as_bfloat16(module: nn.Module, except_in: tuple[str, ...]) -> nn.Module:
    for name, parameter in module.named_parameters():
        wide = any(part in name.split(".") for part in except_in)
        parameter.data = parameter.data.to(torch.float32 if wide else torch.bfloat16)
    return module


def _rewrite(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text()) | changes
    content.pop("_name_or_path", None)  # where this was trained is nobody's business
    file.write_text(json.dumps(content, indent=2) + "\n")
