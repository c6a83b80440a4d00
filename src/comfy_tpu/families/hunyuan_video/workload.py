"""The matrices of a step, by hand."""

from __future__ import annotations

import math

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.hunyuan_video.card import TRANSFORMER
from comfy_tpu.families.hunyuan_video.text import GLYPH_TOKENS
from comfy_tpu.families.hunyuan_video.vae import SPATIAL_SCALE, TEMPORAL_SCALE
from comfy_tpu.families.shared.building import check_whole_numbers
from comfy_tpu.parallel.workload import Matrix, Stack, Workload

_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "num_refiner_layers",
    "in_channels",
    "out_channels",
    "patch_size",
    "patch_size_t",
    "text_embed_dim",
    "text_embed_2_dim",
    "image_embed_dim",
)
_TIME_FEATURES = 256
_GLYPH_HIDDEN = 2048
"""Sizes that diffusers' module has without asking its configuration."""


def workload(config: Config, settings: GenerationSettings) -> Workload:
    config = {**TRANSFORMER, **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    hidden, patch = heads * head_dim, (config["patch_size_t"], config["patch_size"], config["patch_size"])
    ffn, refined = int(hidden * config["mlp_ratio"]), config["num_refiner_layers"]
    frames = (settings.num_frames - 1) // TEMPORAL_SCALE + 1
    height, width = settings.height // SPATIAL_SCALE, settings.width // SPATIAL_SCALE
    square, output = (hidden, hidden), config["out_channels"] * math.prod(patch)
    text, glyph, image = config["text_embed_dim"], config["text_embed_2_dim"], config["image_embed_dim"]
    return Workload(
        batch=settings.num_videos * (2 if settings.guidance_scale > 1 else 1),
        tokens=(frames // patch[0]) * (height // patch[1]) * (width // patch[2]),
        text_tokens=settings.max_sequence_length + GLYPH_TOKENS,
        text="joint",
        heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        stacks=(
            Stack(
                layers=layers,
                matrices=(
                    Matrix("column", square, count=3),
                    Matrix("row", square),
                    Matrix("column", (ffn, hidden)),
                    Matrix("row", (hidden, ffn)),
                    Matrix("column", square, count=3, rows="text"),
                    Matrix("row", square, rows="text"),
                    Matrix("column", (ffn, hidden), rows="text"),
                    Matrix("row", (hidden, ffn), rows="text"),
                    Matrix("column", (6 * hidden, hidden), count=2, rows="samples"),
                ),
            ),
        ),
        outer=(
            Matrix("gather", (hidden, config["in_channels"], *patch)),
            Matrix("gather", (hidden, _TIME_FEATURES), itemsize=4, count=2),
            Matrix("gather", square, itemsize=4, count=2),
            Matrix("gather", square, count=4 * refined),
            Matrix("gather", (2 * hidden, hidden), count=refined),
            Matrix("gather", (4 * hidden, hidden), count=refined),
            Matrix("gather", (hidden, 4 * hidden), count=refined),
            Matrix("gather", (2 * hidden, hidden)),
            Matrix("gather", (output, hidden)),
            Matrix("gather", (hidden, text), count=2, used=False),
            Matrix("gather", square, used=False),
            Matrix("gather", (_GLYPH_HIDDEN, glyph), used=False),
            Matrix("gather", (_GLYPH_HIDDEN, _GLYPH_HIDDEN), used=False),
            Matrix("gather", (hidden, _GLYPH_HIDDEN), used=False),
            Matrix("gather", (image, image), used=False),
            Matrix("gather", (hidden, image), used=False),
        ),
        small_bytes=layers * 2 * (22 * hidden + 2 * ffn + 4 * head_dim),
        output_features=output,
        latent_bytes=settings.num_videos * config["out_channels"] * frames * height * width * 4,
    )
