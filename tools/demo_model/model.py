"""The parts of the demo models: the Wan 2.1 architecture in small, and the directories they are saved in."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from tools.demo_model.captions import vocabulary

LATENT_CHANNELS = 16
TEXT_WIDTH = 128
IMAGE_WIDTH, IMAGE_SIDE = 64, 64
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
    return _new_transformer(in_channels=LATENT_CHANNELS, attention_head_dim=32, ffn_dim=1024, num_layers=layers)


def new_image_transformer(layers: int = 6) -> WanTransformer3DModel:
    """Noise, a mask of four and the image's latents come in. A third of the other: a first frame shows much of it."""
    return _new_transformer(
        in_channels=2 * LATENT_CHANNELS + 4,
        attention_head_dim=16,
        ffn_dim=512,
        num_layers=layers,
        image_dim=IMAGE_WIDTH,
        added_kv_proj_dim=128,
    )


def _new_transformer(**sizes: int) -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=8,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=256,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        **sizes,
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


def new_image_encoder() -> CLIPVisionModel:
    """CLIP's tower, 16×16 patches and a class token: as many tokens as Wan's has. Wan reads the last layer but one."""
    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=IMAGE_WIDTH,
            intermediate_size=2 * IMAGE_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=8,
            image_size=IMAGE_SIDE,
            patch_size=IMAGE_SIDE // 16,
        )
    )


def new_image_processor() -> CLIPImageProcessor:
    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    return CLIPImageProcessor(size=side, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)


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


SHARED_PARTS = ("vae", "text_encoder", "tokenizer", "scheduler", "preview.json")


def save_image_model(
    directory: Path, base: Path, image_encoder: CLIPVisionModel, transformer: WanTransformer3DModel
) -> None:
    """Write the image-to-video model into ``directory``, a folder of the text-to-video model ``base``.

    What both have stays in ``base``; `shared_parts.json` lists it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _as_bfloat16(transformer, except_in=FLOAT32_PARTS).save_pretrained(directory / "transformer")
    _as_bfloat16(image_encoder, except_in=()).save_pretrained(directory / "image_encoder")
    new_image_processor().save_pretrained(directory / "image_processor")
    shared = json.dumps({"from_parent": list(SHARED_PARTS)}, indent=2)
    (directory / "shared_parts.json").write_text(shared + "\n")
    (directory / "presets.json").write_text("{}\n")  # it has not been distilled
    # Nor has it seen windows of long videos.
    settings = json.loads((base / "generation.json").read_text())
    settings = {name: value for name, value in settings.items() if not name.startswith("context")}
    (directory / "generation.json").write_text(json.dumps(settings, indent=2) + "\n")
    index = json.loads((base / "model_index.json").read_text()) | {
        "_class_name": "WanImageToVideoPipeline",
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
    }
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    _rewrite(directory / "image_processor" / "preprocessor_config.json", image_processor_type="CLIPImageProcessor")


def load(directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> WanPipeline:
    return _load(WanPipeline, directory, device, dtype)


def load_image_model(
    directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> WanImageToVideoPipeline:
    """With the shared parts, which diffusers does not look for, from the directory above."""
    shared = WanPipeline.from_pretrained(
        str(directory.resolve().parent), transformer=None, dtype=dtype, local_files_only=True
    ).components
    parts = {name: shared[name] for name in SHARED_PARTS if name in shared}
    return _load(WanImageToVideoPipeline, directory, device, dtype, **parts)


def _load(kind: type, directory: Path, device: str | torch.device, dtype: torch.dtype, **parts: Any) -> Any:
    pipeline = kind.from_pretrained(str(directory), dtype=dtype, local_files_only=True, **parts)
    pipeline.vae.float()  # as everybody runs Wan
    return pipeline.to(device)


def _as_bfloat16(module: nn.Module, except_in: tuple[str, ...]) -> nn.Module:
    for name, parameter in module.named_parameters():
        wide = any(part in name.split(".") for part in except_in)
        parameter.data = parameter.data.to(torch.float32 if wide else torch.bfloat16)
    return module


def _rewrite(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text()) | changes
    content.pop("_name_or_path", None)  # a path of the machine that trained it
    file.write_text(json.dumps(content, indent=2) + "\n")
