"""Texts of any length, filled up to lengths that are compiled, so that a new prompt is not a new program.

Most text encoders fill up what they give. The models below are given as many tokens as a prompt has. Their attention
does not see the filling, and nothing else in them looks at more than one token, means excepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

BUCKET = 256
"""Texts are filled up to a multiple of this: a few sentences fit into the first, and it is little beside a picture."""


@dataclasses.dataclass(frozen=True)
class AnyLength:
    """What a model does with its texts."""

    names: tuple[str, ...]
    """Its arguments with texts, in the order in which they lie beside each other in its joint attention."""
    last: Callable[[Any], bool]
    """Whether they come after the picture there. Attention over fewer tokens is that of the last text alone."""
    before: str = ""
    """The argument whose tokens lie before the texts."""
    mean: str = ""
    """The module that is given the mean of the last text's tokens."""
    optional: tuple[tuple[str, str], ...] = ()
    """(text that some prompts have and others do not, the layer that reads it)"""


ANY_LENGTH = {
    "QwenImageTransformer2DModel": AnyLength(("context",), last=lambda model: False),
    # Also HunyuanVideo-1.5 and HunyuanImage.
    "HunyuanVideo": AnyLength(
        ("txt_byt5", "context"),
        # Until ComfyUI 0.30; then the picture comes last.
        last=lambda model: getattr(model.double_blocks[0], "flipped_img_txt", False),
        before="clip_fea",
        mean="txt_in.c_embedder",
        optional=(("txt_byt5", "byt5_in.fc1"),),
    ),
}


@dataclasses.dataclass(frozen=True)
class FilledTexts:
    """Which of a model's tokens are real, while it is traced."""

    texts: AnyLength
    lengths: tuple[int, ...]
    counts: tuple[torch.Tensor, ...]
    """[batch] for each text: how many of its tokens are real."""
    last: bool
    before: int
    """How many tokens lie before the texts, if the picture is last."""

    def is_real(self, keys: int) -> torch.Tensor:
        """[batch, 1, 1, keys]"""
        parts = [_places(length, count) for length, count in zip(self.lengths, self.counts, strict=True)]
        real = torch.cat(parts, 1)
        if keys < real.shape[1]:
            return real[:, -keys:][:, None, None]
        others = torch.ones(real.shape[0], keys - real.shape[1], dtype=torch.bool, device=real.device)
        before = others.shape[1] if self.last else self.before
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


def fill_texts(module: torch.nn.Module, arguments: dict[str, Any]) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """The arguments with longer texts, and how long each was. As they were and (), where that is not for us."""
    texts = ANY_LENGTH.get(type(module).__name__)
    if texts is None or arguments.get("attention_mask") is not None:
        return arguments, ()
    filled, counts = dict(arguments), []
    batch, _, _ = arguments[texts.names[-1]].shape
    absent = dict(texts.optional)
    for name in texts.names:
        text = arguments.get(name)
        if text is None:
            layer: Any = _find(module, absent[name])
            if layer is None:
                continue
            text = arguments[texts.names[-1]].new_zeros(batch, 0, layer.in_features)
        length = text.shape[1]
        filled[name] = torch.nn.functional.pad(text, (0, 0, 0, max(-length % BUCKET, 0 if length else BUCKET)))
        counts.append(torch.full((batch,), length))
    return filled, tuple(counts)


def _find(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def filled_texts(
    module: torch.nn.Module, arguments: dict[str, Any], counts: tuple[torch.Tensor, ...]
) -> FilledTexts | None:
    """For the arguments that `fill_texts` gave."""
    if not counts:
        return None
    texts = ANY_LENGTH[type(module).__name__]
    lengths = tuple(arguments[name].shape[1] for name in texts.names if arguments.get(name) is not None)
    others = arguments.get(texts.before)
    # A stack of equal blocks stands for the list: its first block answers as they all do.
    return FilledTexts(texts, lengths, counts, texts.last(module), 0 if others is None else others.shape[1])


def in_prompts(
    module: torch.nn.Module, arguments: dict[str, Any], prompts: int, run: Callable[[dict[str, Any]], torch.Tensor]
) -> torch.Tensor:
    """`run` for each prompt by itself, if texts have any length: the prompt and the negative prompt come in one batch
    only where they happen to be equally long, and that batch would be another program."""
    if prompts < 2 or type(module).__name__ not in ANY_LENGTH:
        return run(arguments)
    batch = next(len(value) for value in arguments.values() if isinstance(value, torch.Tensor))
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
