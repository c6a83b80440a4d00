"""The matrices of a step, by hand."""

from __future__ import annotations

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.flux.card import TRANSFORMER
from comfy_tpu.families.flux.schedulers import image_tokens
from comfy_tpu.families.shared.building import check_whole_numbers
from comfy_tpu.parallel.workload import Matrix, Stack, Workload

_FFN = 4

_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "num_single_layers",
    "in_channels",
    "joint_attention_dim",
    "pooled_projection_dim",
)


def workload(config: Config, settings: GenerationSettings) -> Workload:
    # What a configuration leaves out is as in the published models, which is where diffusers has its defaults from.
    config = {**TRANSFORMER, **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    hidden, channels = heads * head_dim, config["in_channels"]
    ffn, embedders = _FFN * hidden, 3 if config.get("guidance_embeds") else 2
    square = (hidden, hidden)
    double, single = config["num_layers"], config["num_single_layers"]
    return Workload(
        batch=settings.num_videos,
        tokens=image_tokens(settings),
        text_tokens=settings.max_sequence_length,
        text="joint",
        heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        stacks=(
            Stack(
                layers=double,
                matrices=(
                    Matrix("column", (6 * hidden, hidden), count=2, rows="samples"),
                    *(
                        matrix
                        for rows in ("tokens", "text")
                        for matrix in (
                            Matrix("column", square, count=3, rows=rows),
                            Matrix("row", square, rows=rows),
                            Matrix("column", (ffn, hidden), rows=rows),
                            Matrix("row", (hidden, ffn), rows=rows),
                        )
                    ),
                ),
            ),
            Stack(
                layers=single,
                matrices=(
                    Matrix("column", (3 * hidden, hidden), rows="samples"),
                    Matrix("column", square, count=3, rows="both"),
                    Matrix("column", (ffn, hidden), rows="both"),
                    Matrix("row", (hidden, hidden + ffn), rows="both"),
                ),
            ),
        ),
        outer=(
            Matrix("gather", (hidden, 256), itemsize=4, count=embedders - 1, rows="samples"),
            Matrix("gather", square, itemsize=4, count=embedders - 1, rows="samples"),
            Matrix("gather", (hidden, config["pooled_projection_dim"]), itemsize=4, used=False),
            Matrix("gather", square, itemsize=4, used=False),
            Matrix("gather", (hidden, config["joint_attention_dim"]), used=False),
            Matrix("gather", (hidden, channels)),
            Matrix("gather", (2 * hidden, hidden), rows="samples"),
            Matrix("gather", (channels, hidden)),
        ),
        small_bytes=2
        * (double * (2 * (13 * hidden + ffn) + 4 * head_dim) + single * (7 * hidden + ffn + 2 * head_dim)),
        output_features=channels,
        latent_bytes=settings.num_videos * channels * image_tokens(settings) * 4,
    )
