"""Qwen-Image's text encoder: Qwen2.5-VL behind a template, whose tokens are dropped. Models that edit show it images
too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL.Image import Image

from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stacking import LayerStack
from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.card import Config
from comfy_tpu.families.model_family import TextEncoder
from comfy_tpu.families.qwen_image.vision import (
    VISION_RULES,
    VISION_STACK,
    build_vision_model,
    embed_images,
    rename_vision,
)
from comfy_tpu.families.shared.language_models import (
    encode_causal,
    language_rules,
    strip_language_prefix,
)
from comfy_tpu.parallel.rules import replicate

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""What the models were trained with, as diffusers' pipeline has it."""
TEMPLATE_TOKENS = 34
"""Tokens of the template before the prompt, which are dropped after encoding."""
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
EDIT_TEMPLATE_TOKENS = 64
"""Tokens before the images and the prompt."""
_MULTIPLE = 32
_IMAGE_TOKEN = "<|image_pad|>"
_SHOWN_IMAGE = "<|vision_start|>{}<|vision_end|>"
_SIGNS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def text_config(config: Config) -> dict[str, Any]:
    """The configuration of the language model: nested by newer versions of transformers, beside the vision model's by
    older ones."""
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise CheckpointError("the config.json of the text encoder has a text_config that is no object")
    return dict(config if nested is None else nested)


def build_language_model(config: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    own = {name: value for name, value in text_config(config).items() if name not in ("architectures", "vision_config")}
    return Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**own))


LANGUAGE_RULES = (*language_rules("layers"), replicate("norm.weight"))

TEXT_ENCODER = ComponentSpec(
    name="text_encoder",
    classes=("Qwen2_5_VLForConditionalGeneration",),
    build=build_language_model,
    unused=("lm_head.weight", "visual.*"),
    stacks=(LayerStack("layers"),),
    shard_attention=False,  # 28 heads, of which tp=8 takes no whole share; the products are divided all the same
    rules=LANGUAGE_RULES,
    rename=strip_language_prefix,
)


def tokenize(tokenizer: Any, prompts: Sequence[str], length: int) -> dict[str, torch.Tensor]:
    """The template with each prompt: `length` tokens for the prompt and the template's end."""
    tokens = tokenizer(
        [TEMPLATE.format(prompt) for prompt in prompts],
        padding="max_length",
        padding_side="right",
        max_length=length + TEMPLATE_TOKENS,
        truncation=True,
        return_tensors="pt",
    )
    return {name: tokens[name].int() for name in ("input_ids", "attention_mask")}


def encode_text(module: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """{"text": [batch, tokens, features]}, zeros behind the prompt: `transformer.prepare` counts the others."""
    hidden = module.norm(encode_causal(module, module.embed_tokens(input_ids)))
    return drop_template(hidden, attention_mask, TEMPLATE_TOKENS)


def drop_template(hidden: torch.Tensor, attention_mask: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    return {"text": torch.where(attention_mask.unsqueeze(-1).bool(), hidden, 0.0)[:, count:]}


def _build_edit_encoder(config: Mapping[str, Any]) -> torch.nn.Module:
    model: Any = build_language_model(config)
    model.visual = build_vision_model(config.get("vision_config"))
    model.image_token = config.get("image_token_id", 151655)
    built: torch.nn.Module = model
    return built


EDIT_TEXT_ENCODER = ComponentSpec(
    name="text_encoder",
    classes=TEXT_ENCODER.classes,
    build=_build_edit_encoder,
    unused=("lm_head.weight",),
    stacks=(*TEXT_ENCODER.stacks, VISION_STACK),
    shard_attention=False,
    rules=(*LANGUAGE_RULES, *VISION_RULES),
    rename=lambda name: rename_vision(strip_language_prefix(name)),
)


def make_image_reader(resize: Callable[[Image], Image]) -> Callable[[Any, Sequence[Image]], dict[str, torch.Tensor]]:
    """`TextEncoder.read_images`: patches of each image, [rows, columns, patches of a token, pixels of a patch], in the
    size that `resize` gives it and the processor's multiple."""

    def read_images(processor: Any, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        found = {}
        for number, image in enumerate(images, 1):
            read = processor(images=[resize(image)], return_tensors="pt")
            _, rows, columns = (int(size) for size in read["image_grid_thw"][0])
            merge = int(processor.merge_size)
            grid = (rows // merge, columns // merge, merge * merge, -1)
            found[f"pixels_{number}"] = read["pixel_values"].reshape(grid)
        return found

    return read_images


def make_edit_tokenizer(*, numbers_images: bool) -> Callable[..., dict[str, torch.Tensor]]:
    """`TextEncoder.tokenize`: the images, then the prompt, `length` tokens behind the images' own.

    `numbers_images`: whether a text before each image says which it is.
    """

    def tokenize_edit(
        tokenizer: Any, prompts: Sequence[str], length: int, **pixels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        grids = [(int(x.shape[0]), int(x.shape[1])) for _, x in sorted(pixels.items())]
        shown = "".join(
            (f"Picture {number}: " if numbers_images else "") + _SHOWN_IMAGE.format(_IMAGE_TOKEN * (rows * columns))
            for number, (rows, columns) in enumerate(grids, 1)
        )
        for prompt in prompts:
            if sign := next((sign for sign in _SIGNS if sign in prompt), None):
                raise InvalidValueError(
                    f"prompt holds {sign}, which stands for an image in the model's template; leave it out",
                    field="prompt",
                )
        tokens = tokenizer(
            [EDIT_TEMPLATE.format(shown + prompt) for prompt in prompts],
            padding="max_length",
            padding_side="right",
            max_length=EDIT_TEMPLATE_TOKENS + shown_length(grids, length),
            truncation=True,
            return_tensors="pt",
        )
        image_token = tokenizer.convert_tokens_to_ids(_IMAGE_TOKEN)
        positions = [_positions((row == image_token).tolist(), grids) for row in tokens["input_ids"]]
        found = {name: tokens[name].int() for name in ("input_ids", "attention_mask")}
        return found | {"positions": torch.tensor(positions, dtype=torch.int32)}

    return tokenize_edit


def shown_length(grids: Sequence[tuple[int, int]], length: int) -> int:
    """Tokens of the images and of `length` behind them, as many as devices divide evenly."""
    count = sum(rows * columns for rows, columns in grids) + length
    return -(-count // _MULTIPLE) * _MULTIPLE


def _positions(is_image: Sequence[bool], grids: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Time, row and column of every token: a text counts up on all three, an image has its own rows and columns.

    transformers does the same where it is told the kind of each token; diffusers 0.42 does not tell it
    (huggingface/diffusers#14194), and all tokens count up.
    """
    axes: list[list[int]] = [[], [], []]
    left, place = list(grids), 0
    for of_image, run in itertools.groupby(is_image):
        count = len(list(run))
        if of_image:
            rows, columns = left.pop(0)
            tokens = [(place, place + token // columns, place + token % columns) for token in range(count)]
            place += max(rows, columns)
        else:
            tokens = [(place + token,) * 3 for token in range(count)]
            place += count
        for axis, values in zip(axes, zip(*tokens, strict=True), strict=True):
            axis.extend(values)
    return axes


def encode_edit(
    module: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    positions: torch.Tensor,
    **pixels: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """As `encode_text`, with the images in place of their tokens."""
    seen = embed_images(module.visual, [pixels[name] for name in sorted(pixels)])
    hidden = module.embed_tokens(input_ids)
    is_image = input_ids == module.image_token
    place = (is_image.int().cumsum(dim=1) - 1).clamp(min=0)
    hidden = torch.where(is_image.unsqueeze(-1), seen.to(hidden.dtype)[place], hidden)
    hidden = module.norm(encode_causal(module, hidden, positions.transpose(0, 1)))
    return drop_template(hidden, attention_mask, EDIT_TEMPLATE_TOKENS)


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    return {"text": (settings.max_sequence_length, config.get("joint_attention_dim", 3584))}


ENCODERS = (TextEncoder(TEXT_ENCODER, encode_text, tokenize=tokenize),)
