"""The matrices of a step, by hand."""

from __future__ import annotations

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.flux2.card import TRANSFORMER_DEV
from comfy_tpu.families.flux2.schedulers import image_tokens
from comfy_tpu.families.shared.building import check_whole_numbers
from comfy_tpu.parallel.workload import Matrix, Stack, Workload

_WHOLE_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "num_single_layers",
    "in_channels",
    "joint_attention_dim",
    "timestep_guidance_channels",
)


def _workload(config: Config, settings: GenerationSettings, branches: int) -> Workload:
    # What a configuration leaves out is as in dev, which is where diffusers has its defaults from.
    config = {**TRANSFORMER_DEV, **config}
    check_whole_numbers(config, _WHOLE_NUMBERS)
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    hidden, channels = heads * head_dim, config["in_channels"]
    ffn, embedders = int(config["mlp_ratio"] * hidden), 2 if config["guidance_embeds"] else 1
    square = (hidden, hidden)
    double, single = config["num_layers"], config["num_single_layers"]
    tokens = image_tokens(settings)
    return Workload(
        batch=settings.num_videos * branches,
        tokens=tokens,
        text_tokens=settings.max_sequence_length,
        text="joint",
        heads=heads,
        head_dim=head_dim,
        ffn=2 * ffn,  # gate and value
        stacks=(
            Stack(
                layers=double,
                matrices=tuple(
                    matrix
                    for rows in ("tokens", "text")
                    for matrix in (
                        Matrix("column", square, count=3, rows=rows),
                        Matrix("row", square, rows=rows),
                        Matrix("column", (2 * ffn, hidden), rows=rows),
                        Matrix("row", (hidden, ffn), rows=rows),
                    )
                ),
            ),
            Stack(
                layers=single,
                matrices=(
                    Matrix("column", (3 * hidden + 2 * ffn, hidden), rows="both"),
                    Matrix("row", (hidden, hidden + ffn), rows="both"),
                ),
            ),
        ),
        outer=(
            Matrix("column", (6 * hidden, hidden), count=2, rows="samples"),
            Matrix("column", (3 * hidden, hidden), rows="samples"),
            Matrix(
                "gather", (hidden, config["timestep_guidance_channels"]), itemsize=4, count=embedders, rows="samples"
            ),
            Matrix("gather", square, itemsize=4, count=embedders, rows="samples"),
            Matrix("gather", (hidden, config["joint_attention_dim"]), used=False),
            Matrix("gather", (hidden, channels)),
            Matrix("gather", (2 * hidden, hidden), rows="samples"),
            Matrix("gather", (channels, hidden)),
        ),
        small_bytes=2 * head_dim * (4 * double + 2 * single),
        output_features=channels,
        latent_bytes=settings.num_videos * channels * tokens * 4,
    )


def workload(config: Config, settings: GenerationSettings) -> Workload:
    return _workload(config, settings, branches=1)


def guided_workload(config: Config, settings: GenerationSettings) -> Workload:
    return _workload(config, settings, branches=2 if settings.guidance_scale > 1 else 1)
