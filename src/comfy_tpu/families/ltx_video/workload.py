"""The matrices of a step, by hand."""

from __future__ import annotations

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.ltx_video.card import TRANSFORMER
from comfy_tpu.families.ltx_video.schedulers import tokens
from comfy_tpu.families.shared.building import check_whole_numbers
from comfy_tpu.parallel.workload import Matrix, Stack, Workload

_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "caption_channels",
    "cross_attention_dim",
    "in_channels",
    "out_channels",
)
_FFN = 4
_TIME_FEATURES = 256
"""Sizes that diffusers' module has without asking its configuration."""


def workload(config: Config, settings: GenerationSettings) -> Workload:
    # What a configuration leaves out is as in the published models, which is where diffusers has its defaults from.
    config = {**TRANSFORMER, **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    hidden = heads * head_dim
    ffn, square = _FFN * hidden, (hidden, hidden)
    return Workload(
        batch=settings.num_videos * (2 if settings.guidance_scale > 1 else 1),
        tokens=tokens(settings),
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
                    Matrix("column", (hidden, config["cross_attention_dim"]), count=2, used=False),  # of the text
                    Matrix("row", square, count=2),
                    Matrix("column", (ffn, hidden)),
                    Matrix("row", (hidden, ffn)),
                ),
                norms=3,
            ),
        ),
        outer=(
            Matrix("gather", (hidden, _TIME_FEATURES), itemsize=4, rows="samples"),
            Matrix("gather", square, itemsize=4, rows="samples"),
            Matrix("gather", (6 * hidden, hidden), itemsize=4, rows="samples"),
            Matrix("gather", (hidden, config["caption_channels"]), used=False),
            Matrix("gather", square, used=False),
            Matrix("gather", (hidden, config["in_channels"])),
            Matrix("gather", (config["out_channels"], hidden)),
        ),
        small_bytes=layers * 2 * (19 * hidden + ffn),
        output_features=config["out_channels"],
        latent_bytes=settings.num_videos * config["out_channels"] * tokens(settings) * 4,
    )
