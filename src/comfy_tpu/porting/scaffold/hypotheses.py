"""How a pipeline may call its parts: each hypothesis is a Python expression, tried on the values of recorded runs.

What holds is what is written into the family: nothing is translated in between.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ftfy
import torch

from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.families.shared.ported import by_pipeline

TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Layout:
    """Latents [batch, channels, frames, height, width], as a pipeline has them."""

    name: str
    expression: str
    """The tensor of this layout, from `latents`."""
    inverse: str
    """The latents, from `{}`, with `height` and `width` in latents."""
    shape: Callable[[int, int, int, int], tuple[int, ...]]
    """(channels, frames, height, width) -> the shape in this layout, without the batch."""
    holds_frames: bool = True
    """Whether there may be more than one frame."""

    def from_latents(self, latents: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = evaluate(self.expression, {"latents": latents})
        return result

    def to_latents(self, tensor: torch.Tensor, height: int, width: int) -> torch.Tensor:
        names = {"tensor": tensor, "height": height, "width": width}
        result: torch.Tensor = evaluate(self.inverse.format("tensor"), names)
        return result


LAYOUTS = (
    Layout("as an image", "latents.squeeze(2)", "{}.unsqueeze(2)", lambda c, f, h, w: (c, h, w), holds_frames=False),
    Layout("as they are", "latents", "{}", lambda c, f, h, w: (c, f, h, w)),
    Layout(
        "frames first",
        "latents.permute(0, 2, 1, 3, 4)",
        "{}.permute(0, 2, 1, 3, 4)",
        lambda c, f, h, w: (f, c, h, w),
    ),
    Layout(
        "as tokens of 2 × 2",
        "as_tokens(latents)",
        "as_latents({}, height, width)",
        lambda c, f, h, w: (h * w // 4, 4 * c),
        holds_frames=False,
    ),
)

TIMESTEPS = (
    "timestep.expand(batch)",
    "timestep.expand(batch) / 1000",
    "1 - timestep.expand(batch) / 1000",
    "1000 - timestep.expand(batch)",
    "timestep",
    "timestep / 1000",
)

SIZES = ("height", "width", "latents.shape[2]", "height // 2", "width // 2")
"""Whole numbers that a transformer may be told; height and width are in latents."""

ANSWERS = ("{}", "{}.chunk(2, dim=1)[0]", "-{}", "{}.chunk(2, dim=2)[0]")
"""The part of a transformer's answer that the scheduler steps by, in the answer's layout."""

PROMPT_CLEANUPS = (
    "text",
    "text.strip()",
    "text.lower().strip()",
    're.sub(r"\\s+", " ", html.unescape(html.unescape(ftfy.fix_text(text)))).strip()',
)
"""What a pipeline may make of a prompt before it is tokenized."""

STATISTICS = {
    '[0.0] * channels, [1 / config["scaling_factor"]] * channels': ("scaling_factor",),
    '[config["shift_factor"]] * channels, [1 / config["scaling_factor"]] * channels': (
        "scaling_factor",
        "shift_factor",
    ),
    'list(config["latents_mean"]), list(config["latents_std"])': ("latents_mean", "latents_std"),
    'list(config["latents_mean"]), [each / config["scaling_factor"] for each in config["latents_std"]]': (
        "latents_mean",
        "latents_std",
        "scaling_factor",
    ),
    "[0.0] * channels, [1.0] * channels": (),
}
"""Mean and deviation of the VAE's latents -> the keys of its configuration that the expression reads."""


@dataclasses.dataclass(frozen=True)
class EncoderOutput:
    """What a pipeline may take from a text encoder."""

    expression: str
    """The text for the family's file, with functions of families/shared/text_encoders.py."""
    compute: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    """The same on transformers' own module: (module, input_ids, attention_mask)."""


def _zero_padding(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return value * mask.unsqueeze(-1).to(value.dtype)


def _t5_outputs(function: str) -> tuple[EncoderOutput, ...]:
    plain, masked = f"{function}(module, input_ids)", f"{function}(module, input_ids, attention_mask)"
    return (
        EncoderOutput(plain, lambda m, ids, mask: m(ids)[0]),
        EncoderOutput(masked, lambda m, ids, mask: m(ids, mask)[0]),
        EncoderOutput(
            f"zero_padding({masked}, attention_mask)", lambda m, ids, mask: _zero_padding(m(ids, mask)[0], mask)
        ),
        EncoderOutput(f"zero_padding({plain}, attention_mask)", lambda m, ids, mask: _zero_padding(m(ids)[0], mask)),
        EncoderOutput("attention_mask", lambda m, ids, mask: mask),
    )


ENCODER_OUTPUTS: Mapping[str, tuple[EncoderOutput, ...]] = {
    "T5EncoderModel": _t5_outputs("encode_t5"),
    "UMT5EncoderModel": _t5_outputs("encode_umt5"),
    "CLIPTextModel": (
        EncoderOutput("pooled_clip(module, input_ids)", lambda m, ids, mask: m(ids).pooler_output),
        EncoderOutput("module(input_ids).last_hidden_state", lambda m, ids, mask: m(ids).last_hidden_state),
        EncoderOutput(
            "module(input_ids, output_hidden_states=True).hidden_states[-2]",
            lambda m, ids, mask: m(ids, output_hidden_states=True).hidden_states[-2],
        ),
    ),
}

_NAMES: dict[str, Any] = {
    "torch": torch,
    "as_tokens": as_tokens,
    "as_latents": as_latents,
    "by_pipeline": by_pipeline,
    "re": re,
    "html": html,
    "ftfy": ftfy,
}


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    return eval(expression, {**_NAMES, **names})  # an expression of this file


def agrees(found: Any, expected: Any) -> bool:
    """Whether values are the same, whatever their dtype; shapes too."""
    if isinstance(expected, (tuple, list)) and isinstance(found, (tuple, list)):
        return len(found) == len(expected) and all(agrees(*pair) for pair in zip(found, expected, strict=True))
    if not isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and bool(found == expected)
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    difference = (found.double() - expected.double()).abs().max() if expected.numel() else torch.zeros(())
    return bool(difference <= TOLERANCE * expected.double().abs().max().clamp_min(1e-3))


def find_expression(expressions: Iterable[str], cases: Sequence[tuple[Mapping[str, Any], Any]]) -> str | None:
    """The first expression that holds in every case, each of (names, expected value)."""
    for expression in expressions:
        try:
            if all(agrees(evaluate(expression, names), expected) for names, expected in cases):
                return expression
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
            continue  # it does not even fit
    return None
