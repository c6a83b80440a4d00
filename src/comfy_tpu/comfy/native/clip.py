"""CLIP: runs the transformers of ComfyUI's text encoders on the devices, by patches on a clone.

Tokenizers, embeddings and weights of words stay ComfyUI's.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import comfy.clip_model
import comfy.text_encoders.llama
import comfy.text_encoders.t5
import torch
from comfy.sd1_clip import SDClipModel

from comfy_tpu.comfy.native.hosting import Choices, Host
from comfy_tpu.comfy.native.replacement import Fallback, Replacement, current_run, refuse_large
from comfy_tpu.comfy.run import report_idle

if TYPE_CHECKING:
    from comfy.sd import CLIP

BUCKET = 256
"""Texts that their tokenizer does not pad are padded to a multiple of this; each length is a program. Templates of 30
to 130 tokens and a prompt of a few sentences fit into the first, so that a session compiles once."""
TOKENIZER_LENGTHS = (77, 128, 256, 512)
"""The lengths to which ComfyUI's tokenizers for T5 pad: such texts are not padded further, and need no mask."""


def compile_clip(clip: CLIP, choices: Choices) -> CLIP:
    """A clone whose text models compute on the devices."""
    compiled = clip.clone()
    found = False
    for path, part in compiled.cond_stage_model.named_modules():
        if isinstance(part, SDClipModel):
            name = f"{path}.transformer" if path else "transformer"
            text = DeviceText(compiled.cond_stage_model, name, "forward", choices)
            compiled.patcher.add_object_patch(f"{name}.forward", text)
            found = True
    fallback = Fallback(type(compiled.cond_stage_model).__name__, current_run().node)
    if found:
        fallback.clear()
    else:
        reason = "there is no text model of ComfyUI's in it"
        fallback.explain(reason)
        refuse_large(compiled.cond_stage_model, compiled.patcher.load_device, reason, choices)
    return compiled


class DeviceText(Replacement):
    """Replaces the forward of a text model."""

    part = "text_encoder"

    def _find_problem(self, tokens: Any = None, attention_mask: Any = None, **options: Any) -> str:
        if options.get("embeds") is None:
            return "it is given tokens instead of their embeddings"
        return super()._find_problem()

    def _kind(self, tokens: Any = None, attention_mask: Any = None, **options: Any) -> Hashable:
        return frozenset(name for name, value in _drop_empty_info(options).items() if value is not None)

    def _run_on_devices(self, host: Host, tokens: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        module, mask = self._module, attention_mask
        embeds = options.pop("embeds")
        length = embeds.shape[1]
        padding = -length % BUCKET if _can_be_padded(module, mask, length) else 0
        if padding and mask is None and isinstance(module, comfy.text_encoders.t5.T5):
            mask = torch.ones(embeds.shape[:2])
        embeds = torch.nn.functional.pad(embeds.to(host.dtype), (0, 0, 0, padding))
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, padding))
        counts = options.pop("num_tokens", None)
        if isinstance(module, comfy.clip_model.CLIPTextModel) and counts is not None:
            counts = torch.tensor(counts)  # not as numbers: every count would be a program
        else:
            counts = None  # no other model reads it
        host.size = f"{embeds.shape[1]} tokens"
        # One by one: a long prompt comes in sections, a weighted one with an empty one, and every number of them would
        # be a program.
        rows = [
            host(_forward, _row(mask, index), embeds[index : index + 1], _row(counts, index), _drop_empty_info(options))
            for index in range(len(embeds))
        ]
        host.show_end()
        report_idle()
        return tuple(_cut_padding(_concat_rows(parts), length, length + padding) for parts in zip(*rows, strict=True))


def _row(tensor: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[index : index + 1]


def _concat_rows(parts: tuple[Any, ...]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]


def _forward(module: Any, mask: Any, embeds: torch.Tensor, counts: Any, options: dict[str, Any]) -> Any:
    forward = type(module).forward
    if counts is None:
        return forward(module, None, mask, embeds=embeds, num_tokens=[embeds.shape[1]] * len(embeds), **options)
    # The model would take the count of tokens as a number, to find the last one; here it is found by its index.
    last, *others = forward(module, None, mask, embeds=embeds, num_tokens=[1] * len(embeds), **options)
    pooled = last[torch.arange(len(last), device=last.device), counts.long() - 1]
    return last, others[0], module.text_projection(pooled), pooled


def _can_be_padded(module: torch.nn.Module, mask: torch.Tensor | None, length: int) -> bool:
    """Whether padding does not change the text's embeddings: attention is causal, or a mask hides the padding."""
    if isinstance(module, comfy.text_encoders.t5.T5):
        return mask is not None or length not in TOKENIZER_LENGTHS
    return isinstance(module, comfy.text_encoders.llama.BaseLlama)


def _drop_empty_info(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if not (name == "embeds_info" and not value)}


def _cut_padding(result: Any, length: int, padded: int) -> Any:
    if length == padded or not isinstance(result, torch.Tensor) or result.ndim < 3 or result.shape[-2] != padded:
        return result
    return result[..., :length, :]
