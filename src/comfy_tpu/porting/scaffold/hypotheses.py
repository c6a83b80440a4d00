"""How a pipeline may call its parts: each hypothesis is an expression in Python, tried on what was watched.

What holds is what is written into the family: nothing is translated in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from comfy_tpu.families.shared.patches import as_latents, as_tokens
from comfy_tpu.families.shared.ported import by_pipeline

TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Layout:
    """Latents [batch, channels, frames, height, width], as a pipeline has them."""

    name: str
    there: str
    """Of `latents`."""
    back: str
    """Of `{}`, with `height` and `width` in latents."""
    shape: Callable[[int, int, int, int], tuple[int, ...]]
    """(channels, frames, height, width) -> what it looks like, without the batch."""
    videos: bool = True
    """It holds more than one frame."""

    def to(self, latents: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = evaluated(self.there, {"latents": latents})
        return result

    def of(self, tensor: torch.Tensor, height: int, width: int) -> torch.Tensor:
        result: torch.Tensor = evaluated(
            self.back.format("tensor"), {"tensor": tensor, "height": height, "width": width}
        )
        return result


LAYOUTS = (
    Layout("as an image", "latents.squeeze(2)", "{}.unsqueeze(2)", lambda c, f, h, w: (c, h, w), videos=False),
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
        videos=False,
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
"""What of a transformer's answer the scheduler steps by, before it is brought back from its layout."""

CLEANED = (
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
"""Mean and deviation of the VAE's latents -> what of its configuration that reads."""

Encode = Callable[[Any, torch.Tensor, torch.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a text encoder may make of a prompt."""

    written: str
    """The expression for the family's file, with functions of families/shared/text_encoders.py."""
    compute: Encode
    """The same on transformers' own module: (module, input_ids, attention_mask)."""


def _masked(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return value * mask.unsqueeze(-1).to(value.dtype)


def _t5_readings(function: str) -> tuple[Reading, ...]:
    plain, masked = f"{function}(module, input_ids)", f"{function}(module, input_ids, attention_mask)"
    return (
        Reading(plain, lambda m, ids, mask: m(ids)[0]),
        Reading(masked, lambda m, ids, mask: m(ids, mask)[0]),
        Reading(f"zero_padding({masked}, attention_mask)", lambda m, ids, mask: _masked(m(ids, mask)[0], mask)),
        Reading(f"zero_padding({plain}, attention_mask)", lambda m, ids, mask: _masked(m(ids)[0], mask)),
        Reading("attention_mask", lambda m, ids, mask: mask),
    )


READINGS: Mapping[str, tuple[Reading, ...]] = {
    "T5EncoderModel": _t5_readings("encode_t5"),
    "UMT5EncoderModel": _t5_readings("encode_umt5"),
    "CLIPTextModel": (
        Reading("pooled_clip(module, input_ids)", lambda m, ids, mask: m(ids).pooler_output),
        Reading("module(input_ids).last_hidden_state", lambda m, ids, mask: m(ids).last_hidden_state),
        Reading(
            "module(input_ids, output_hidden_states=True).hidden_states[-2]",
            lambda m, ids, mask: m(ids, output_hidden_states=True).hidden_states[-2],
        ),
    ),
}

_NAMES: dict[str, Any] = {"torch": torch, "as_tokens": as_tokens, "as_latents": as_latents, "by_pipeline": by_pipeline}


def evaluated(expression: str, names: Mapping[str, Any]) -> Any:
    return eval(expression, {**_NAMES, **names})  # an expression of this file


def agrees(found: Any, wanted: Any) -> bool:
    """Values, whatever their dtype; shapes too."""
    if isinstance(wanted, (tuple, list)) and isinstance(found, (tuple, list)):
        return len(found) == len(wanted) and all(agrees(*pair) for pair in zip(found, wanted, strict=True))
    if not isinstance(wanted, torch.Tensor):
        return type(found) is type(wanted) and bool(found == wanted)
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
        return False
    difference = (found.double() - wanted.double()).abs().max() if wanted.numel() else torch.zeros(())
    return bool(difference <= TOLERANCE * wanted.double().abs().max().clamp_min(1e-3))


def first_that_holds(expressions: Iterable[str], cases: Sequence[tuple[Mapping[str, Any], Any]]) -> str | None:
    """The first expression that gives what was watched in every case, of (names, wanted)."""
    for expression in expressions:
        try:
            if all(agrees(evaluated(expression, names), wanted) for names, wanted in cases):
                return expression
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
            continue  # it does not even fit
    return None
