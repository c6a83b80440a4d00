"""Pads texts to a few lengths, so that a new prompt is not a new program.

Most text encoders pad their output to a fixed length, which a longer prompt exceeds; some return as many tokens as the
prompt has. Our padding is masked in the attention of the models below; no other layer of theirs mixes tokens, except
means, which are corrected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

BUCKET = 256
"""Texts are padded to a multiple of this: a few sentences fit into the first, and an image has many more tokens."""
SECTION = 77
"""Tokens of one section of CLIP, which reads a longer prompt in several."""


@dataclasses.dataclass(frozen=True)
class TextPadding:
    """How a model uses its texts, and how they are padded."""

    names: tuple[str, ...]
    """The model's arguments with texts; the first is the prompt, which every call has."""
    place: Literal["before", "behind", "apart"]
    """The place of the texts beside the image in joint attention. apart: the image attends to the text separately."""
    flipped: str = ""
    """The blocks whose `flipped_img_txt` tells whether texts are behind the image; without it they are before it."""
    others: str = ""
    """The argument whose tokens come before the texts."""
    encoder_lengths: tuple[int, ...] = ()
    """Lengths to which the encoder itself pads: such texts are not padded further, and need no mask."""
    bucket: int = BUCKET
    multiple: int = 1
    """The divisor of a text's length; an argument of another length is not a text."""
    mean: str = ""
    """The module whose input is the mean of the prompt's tokens."""
    prompt_last_with: str = ""
    """The module that puts the prompt after the other texts in joint attention; without it the prompt comes first."""
    optional: tuple[tuple[str, str], ...] = ()
    """(argument with a text that not all prompts have, the layer that reads it)"""
    patch: str = ""
    """The attribute with the side of a patch, for models with attention over the image alone."""

    def padding(self, length: int, image_sizes: frozenset[int]) -> int:
        """The number of tokens to add. A padded text never has as many tokens as an image at any level."""
        padding = max(-length % self.bucket, 0 if length else self.bucket)
        return padding if length + padding not in image_sizes else padding + self.bucket


TEXT_PADDINGS = {
    "QwenImageTransformer2DModel": TextPadding(("context",), "before"),
    # Also HunyuanVideo-1.5 and HunyuanImage. `txt_in` attends to the prompt alone. Texts are behind the image in
    # ComfyUI 0.7, before it in 0.33.
    "HunyuanVideo": TextPadding(
        ("context", "txt_byt5"),
        "behind",
        flipped="double_blocks",
        others="clip_fea",
        mean="txt_in.c_embedder",
        prompt_last_with="cond_type_embedding",
        optional=(("txt_byt5", "byt5_in.fc1"),),
    ),
    "Flux": TextPadding(("context",), "before", encoder_lengths=(256, 512)),  # Flux.1 and Flux.2
    "OpenAISignatureMMDITWrapper": TextPadding(
        ("context",), "before", encoder_lengths=(2 * SECTION,), patch="patch_size"
    ),  # SD3
    "UNetModel": TextPadding(
        ("context",), "apart", encoder_lengths=(SECTION,), bucket=4 * SECTION, multiple=SECTION
    ),  # SD, SDXL
}


@dataclasses.dataclass(frozen=True)
class PaddedTexts:
    """Which tokens of a model's texts are real and which are padding, inside a trace."""

    texts: TextPadding
    lengths: tuple[int, ...]
    counts: tuple[torch.Tensor, ...]
    """[batch] for each text: the number of its real tokens."""
    image_tokens: int | None
    """The number of image tokens, for models with attention over the image alone."""
    behind: bool
    before: int
    """The number of other tokens before texts that are not behind the image."""
    prompt_last: bool
    """Whether the prompt comes after the other texts."""

    def real_key_mask(self, keys: int) -> torch.Tensor | None:
        """bool [batch, 1, 1, keys] for an attention over this many keys: True for real tokens. None: all are real."""
        parts = [_real_token_mask(length, count) for length, count in zip(self.lengths, self.counts, strict=True)]
        real = torch.cat(parts[::-1] if self.prompt_last else parts, 1)
        if keys == self.image_tokens or (self.texts.place == "apart" and keys != real.shape[1]):
            return None
        if keys == self.lengths[0]:
            return parts[0][:, None, None]
        others = torch.ones(real.shape[0], keys - real.shape[1], dtype=torch.bool, device=real.device)
        before = others.shape[1] if self.behind else self.before
        return torch.cat([others[:, :before], real, others[:, before:]], 1)[:, None, None]

    def joint_text(self, queries: int, keys: int) -> tuple[int, torch.Tensor] | None:
        """For self-attention over the image and one text before or behind it: the number of the text's tokens, and
        [batch] how many tokens are real, of the image and the text. None: another attention."""
        if len(self.lengths) > 1 or self.texts.place == "apart" or (self.before and not self.behind):
            return None
        if queries != keys or keys <= self.lengths[0] or keys == self.image_tokens:
            return None
        return self.lengths[0], self.counts[0] + (keys - self.lengths[0])

    @contextlib.contextmanager
    def correct_means(self, module: torch.nn.Module) -> Iterator[None]:
        """Corrects the means that the model takes over texts: it divides sums by the padded length."""
        if not self.texts.mean:
            yield
            return
        share = self.lengths[0] / self.counts[0].view(-1, 1)
        hook = module.get_submodule(self.texts.mean).register_forward_pre_hook(
            lambda _, given: (given[0] * share.to(given[0].dtype), *given[1:])
        )
        try:
            yield
        finally:
            hook.remove()


def _real_token_mask(length: int, count: torch.Tensor) -> torch.Tensor:
    return torch.arange(length, device=count.device) < count.view(-1, 1)


def pad_texts(module: torch.nn.Module, arguments: dict[str, Any]) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """The arguments with padded texts, and the real length of each text; the arguments unchanged and () for a model or
    text that needs no padding."""
    texts = TEXT_PADDINGS.get(type(module).__name__)
    if texts is None or arguments.get("attention_mask") is not None:
        return arguments, ()
    prompt = arguments[texts.names[0]]
    if prompt is None or prompt.shape[1] in texts.encoder_lengths or prompt.shape[1] % texts.multiple:
        return arguments, ()
    image_sizes = _image_token_counts(arguments["x"]) if texts.place == "apart" else frozenset()
    padded, counts = dict(arguments), []
    absent = dict(texts.optional)
    for name in texts.names:
        text = arguments.get(name)
        if text is None:
            layer: Any = _find(module, absent[name])
            if layer is None:
                continue
            text = prompt.new_zeros(len(prompt), 0, layer.in_features)
        length = text.shape[1]
        padded[name] = torch.nn.functional.pad(text, (0, 0, 0, texts.padding(length, image_sizes)))
        counts.append(torch.full((len(prompt),), length))
    return padded, tuple(counts)


def _image_token_counts(sample: torch.Tensor) -> frozenset[int]:
    """The numbers of tokens of an image at every level of a network that halves it."""
    return frozenset(math.prod(-(-side // 2**level) for side in sample.shape[2:]) for level in range(8))


def _find(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def describe_padding(
    module: torch.nn.Module, arguments: dict[str, Any], counts: tuple[torch.Tensor, ...]
) -> PaddedTexts | None:
    """The padding of the arguments that `pad_texts` returned."""
    if not counts:
        return None
    texts = TEXT_PADDINGS[type(module).__name__]
    lengths = tuple(arguments[name].shape[1] for name in texts.names if arguments.get(name) is not None)
    image_tokens = None
    if texts.patch:
        patch = getattr(module, texts.patch)
        image_tokens = math.prod(-(-side // patch) for side in arguments["x"].shape[2:])
    behind = texts.place == "behind"
    if texts.flipped:  # a list of blocks, or what stands for one: its first answers as they all do
        behind = getattr(getattr(module, texts.flipped)[0], "flipped_img_txt", False)
    others = arguments.get(texts.others)
    before = 0 if others is None else others.shape[1]
    prompt_last = _find(module, texts.prompt_last_with) is not None if texts.prompt_last_with else False
    return PaddedTexts(texts, lengths, counts, image_tokens, behind, before, prompt_last)


def run_per_prompt(
    module: torch.nn.Module, arguments: dict[str, Any], prompts: int, run: Callable[[dict[str, Any]], torch.Tensor]
) -> torch.Tensor:
    """Runs each prompt separately if the encoder does not pad: the prompt and the negative prompt are in one batch only
    if they happen to have the same length, and that batch would be another program."""
    texts = TEXT_PADDINGS.get(type(module).__name__)
    if prompts < 2 or texts is None or texts.encoder_lengths:
        return run(arguments)
    batch = next(len(value) for value in arguments.values() if isinstance(value, torch.Tensor))
    if batch % prompts:  # a wrapper runs them by itself
        return run(arguments)
    size = batch // prompts
    return torch.cat([run(_slice(arguments, batch, start, start + size)) for start in range(0, batch, size)])


def _slice(tree: Any, batch: int, start: int, stop: int) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree[start:stop] if tree.ndim and len(tree) == batch else tree
    if isinstance(tree, dict):
        return {name: _slice(value, batch, start, stop) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_slice(value, batch, start, stop) for value in tree)
    return tree
