"""The matrices of a step, by hand."""

from __future__ import annotations

import math

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.shared.building import check_whole_numbers
from comfy_tpu.families.wan.card import TRANSFORMER_14B
from comfy_tpu.parallel.workload import Matrix, Stack, Workload

TEMPORAL_SCALE = 4

_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "ffn_dim",
    "freq_dim",
    "text_dim",
    "in_channels",
    "out_channels",
)


def workload(config: Config, settings: GenerationSettings, *, spatial_scale: int = 8, models: int = 1) -> Workload:
    """`models`: transformers of this size that stay on the devices."""
    # What a configuration leaves out is as in the 14B, which is where diffusers has its defaults from.
    config = {**TRANSFORMER_14B, **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim, ffn = config["num_attention_heads"], config["attention_head_dim"], config["ffn_dim"]
    layers, hidden, patch = config["num_layers"], heads * head_dim, tuple(config["patch_size"])
    frames = (settings.num_frames - 1) // TEMPORAL_SCALE + 1
    height, width = (side // spatial_scale for side in (settings.height, settings.width))
    square = (hidden, hidden)
    return Workload(
        batch=settings.num_videos * (2 if settings.guidance_scale > 1 else 1),
        tokens=(frames // patch[0]) * (height // patch[1]) * (width // patch[2]),
        text_tokens=settings.max_sequence_length,
        text="keys",
        heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        stacks=(
            Stack(
                layers=layers,
                matrices=(
                    Matrix("column", square, count=4),  # q, k, v of the video, q of the text
                    # k, v of the text, and of a picture: in the prompt cache
                    Matrix("column", square, count=4 if config.get("added_kv_proj_dim") else 2, used=False),
                    Matrix("row", square, count=2),
                    Matrix("column", (ffn, hidden)),
                    Matrix("row", (hidden, ffn)),
                ),
                norms=3,
            ),
        ),
        outer=(
            Matrix("gather", (hidden, config["freq_dim"]), itemsize=4),
            Matrix("gather", square, itemsize=4),
            Matrix("gather", (6 * hidden, hidden)),
            Matrix("gather", (hidden, config["text_dim"]), used=False),
            Matrix("gather", square, used=False),
            Matrix("gather", (hidden, config["in_channels"], *patch)),
            Matrix("gather", (config["out_channels"] * math.prod(patch), hidden)),
        ),
        small_bytes=layers * (2 * (13 * hidden + ffn) + 4 * 8 * hidden),
        output_features=config["out_channels"] * math.prod(patch),
        latent_bytes=settings.num_videos * config["out_channels"] * frames * height * width * 4,
        models=models,
    )
