"""Texts of any length, filled up to lengths that are compiled, so that a new prompt is not a new program.

Most text encoders fill up what they give, to a length that a longer prompt exceeds; some give as many tokens as a
prompt has. Attention in the models below does not see our filling, and nothing else in them looks at more than one
token, means excepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

BUCKET = 256
"""Texts are filled up to a multiple of this: a few sentences fit into the first, and it is little beside an image."""
SECTION = 77
"""Tokens that a CLIP sees at once. It sees a longer prompt in several."""


@dataclasses.dataclass(frozen=True)
class AnyLength:
    """What a model does with its texts."""

    names: tuple[str, ...]
    """Its arguments with texts, in the order in which they lie beside each other in its joint attention."""
    place: Literal["before", "behind", "apart"]
    """Of the texts beside the image in joint attention. Apart: the image attends to the text by itself."""
    flipped: str = ""
    """Blocks that say by `flipped_img_txt` whether texts are behind the image; else they are before it."""
    others: str = ""
    """The argument whose tokens lie in front of the texts."""
    usual: tuple[int, ...] = ()
    """Lengths up to which the encoder itself fills up: these are left alone, and need no mask."""
    bucket: int = BUCKET
    multiple: int = 1
    """Of which a length must be, or it is not a text."""
    mean: str = ""
    """The module that is given the mean of the last text's tokens."""
    optional: tuple[tuple[str, str], ...] = ()
    """(text that some prompts have and others do not, the layer that reads it)"""
    patch: str = ""
    """The attribute with the side of a patch, where images also attend to nothing but themselves."""

    def filling(self, length: int, pictures: frozenset[int]) -> int:
        """How many tokens to add. Never so many that a text would be taken for an image."""
        fill = max(-length % self.bucket, 0 if length else self.bucket)
        return fill if length + fill not in pictures else fill + self.bucket


ANY_LENGTH = {
    "QwenImageTransformer2DModel": AnyLength(("context",), "before"),
    # Also HunyuanVideo-1.5 and HunyuanImage. Attention over fewer tokens than the texts have is that of the last alone.
    # Texts are behind the image in ComfyUI 0.7, before it in 0.33.
    "HunyuanVideo": AnyLength(
        ("txt_byt5", "context"),
        "behind",
        flipped="double_blocks",
        others="clip_fea",
        mean="txt_in.c_embedder",
        optional=(("txt_byt5", "byt5_in.fc1"),),
    ),
    "Flux": AnyLength(("context",), "before", usual=(256, 512)),  # Flux.1 and Flux.2
    "OpenAISignatureMMDITWrapper": AnyLength(("context",), "before", usual=(2 * SECTION,), patch="patch_size"),  # SD3
    "UNetModel": AnyLength(("context",), "apart", usual=(SECTION,), bucket=4 * SECTION, multiple=SECTION),  # SD, SDXL
}


@dataclasses.dataclass(frozen=True)
class PaddedTexts:
    """Which of a model's tokens are real, while it is traced."""

    texts: AnyLength
    lengths: tuple[int, ...]
    counts: tuple[torch.Tensor, ...]
    """[batch] for each text: how many of its tokens are real."""
    picture: int | None
    """Tokens of an image that also attends to itself alone."""
    behind: bool
    before: int
    """How many tokens lie before texts that are not behind the image."""

    def is_real(self, keys: int) -> torch.Tensor | None:
        """[batch, 1, 1, keys], for an attention over so many; None: all of them are."""
        parts = [_places(length, count) for length, count in zip(self.lengths, self.counts, strict=True)]
        real = torch.cat(parts, 1)
        if keys == self.picture or (self.texts.place == "apart" and keys != real.shape[1]):
            return None
        if keys < real.shape[1]:
            return real[:, -keys:][:, None, None]
        others = torch.ones(real.shape[0], keys - real.shape[1], dtype=torch.bool, device=real.device)
        before = others.shape[1] if self.behind else self.before
        return torch.cat([others[:, :before], real, others[:, before:]], 1)[:, None, None]

    @contextlib.contextmanager
    def means(self, module: torch.nn.Module) -> Iterator[None]:
        """The model divides sums by the length that it sees, of which the filling is a part."""
        if not self.texts.mean:
            yield
            return
        share = self.lengths[-1] / self.counts[-1].view(-1, 1)
        hook = module.get_submodule(self.texts.mean).register_forward_pre_hook(
            lambda _, given: (given[0] * share.to(given[0].dtype), *given[1:])
        )
        try:
            yield
        finally:
            hook.remove()


def _places(length: int, count: torch.Tensor) -> torch.Tensor:
    return torch.arange(length, device=count.device) < count.view(-1, 1)


def pad_texts(module: torch.nn.Module, arguments: dict[str, Any]) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """The arguments with longer texts, and how long each was. As they were and (), where that is not for us."""
    texts = ANY_LENGTH.get(type(module).__name__)
    if texts is None or arguments.get("attention_mask") is not None:
        return arguments, ()
    last = arguments[texts.names[-1]]
    if last is None or last.shape[1] in texts.usual or last.shape[1] % texts.multiple:
        return arguments, ()
    pictures = _sizes_of_pictures(arguments["x"]) if texts.place == "apart" else frozenset()
    filled, counts = dict(arguments), []
    absent = dict(texts.optional)
    for name in texts.names:
        text = arguments.get(name)
        if text is None:
            layer: Any = _find(module, absent[name])
            if layer is None:
                continue
            text = last.new_zeros(len(last), 0, layer.in_features)
        length = text.shape[1]
        filled[name] = torch.nn.functional.pad(text, (0, 0, 0, texts.filling(length, pictures)))
        counts.append(torch.full((len(last),), length))
    return filled, tuple(counts)


def _sizes_of_pictures(sample: torch.Tensor) -> frozenset[int]:
    """Tokens of an image at every level of a network that halves it."""
    return frozenset(math.prod(-(-side // 2**level) for side in sample.shape[2:]) for level in range(8))


def _find(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def padded_texts(
    module: torch.nn.Module, arguments: dict[str, Any], counts: tuple[torch.Tensor, ...]
) -> PaddedTexts | None:
    """For the arguments that `pad_texts` gave."""
    if not counts:
        return None
    texts = ANY_LENGTH[type(module).__name__]
    lengths = tuple(arguments[name].shape[1] for name in texts.names if arguments.get(name) is not None)
    picture = None
    if texts.patch:
        patch = getattr(module, texts.patch)
        picture = math.prod(-(-side // patch) for side in arguments["x"].shape[2:])
    behind = texts.place == "behind"
    if texts.flipped:  # a list of blocks, or what stands for one: its first answers as they all do
        behind = getattr(getattr(module, texts.flipped)[0], "flipped_img_txt", False)
    others = arguments.get(texts.others)
    return PaddedTexts(texts, lengths, counts, picture, behind, 0 if others is None else others.shape[1])


def in_prompts(
    module: torch.nn.Module, arguments: dict[str, Any], prompts: int, run: Callable[[dict[str, Any]], torch.Tensor]
) -> torch.Tensor:
    """`run` for each prompt by itself, if no length is usual: the prompt and the negative prompt come in one batch only
    where they happen to be equally long, and that batch would be another program."""
    texts = ANY_LENGTH.get(type(module).__name__)
    if prompts < 2 or texts is None or texts.usual:
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
