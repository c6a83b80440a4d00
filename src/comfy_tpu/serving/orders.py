"""From what a client said, in OpenAI's words and ours, to a request of the ledger."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ModelCard, Preset
from comfy_tpu.families.presets import AUTO, find_preset
from comfy_tpu.jobs.request import Request
from comfy_tpu.serving.config import ServeConfig
from comfy_tpu.serving.uploads import FILE_FIELDS

HINTS: dict[str, tuple[str, ...]] = {
    "quality": ("auto", "standard", "hd", "low", "medium", "high"),
    "style": ("vivid", "natural"),
    "moderation": ("auto", "low"),
}
"""Fields of OpenAI's API that change nothing here, and what they may be."""
FIXED: dict[str, tuple[str, ...]] = {
    "background": ("auto", "opaque"),
    "stream": ("false",),
    "partial_images": ("0",),
    "response_format": ("b64_json",),
}
"""Fields of OpenAI's API of whose meanings there is one here."""
_LIMITED = {**HINTS, **FIXED}
_SETTINGS = {field.name: field.type for field in dataclasses.fields(GenerationSettings)}
SAME_FIELDS = {"steps": "num_inference_steps", "guidance": "guidance_scale", "frames": "num_frames", "n": "num_videos"}
"""Other names of settings."""
_TEXTS = frozenset(name for name, kind in _SETTINGS.items() if kind == "str")
_SIZE = re.compile(r"^([1-9][0-9]{0,4})x([1-9][0-9]{0,4})$")
_LORA_NAME = re.compile(r"[\w][\w .+-]*")
_LORA = re.compile(r"[^:]*(:(?P<strength>(?!(high|low|all)$)[^:]+))?(:(?P<noise>high|low|all))?")
LORAS_MAX = 16
UPSCALE_FIELDS = ("upscale", "upscale_strength", "upscale_steps", "upscale_by")
"""Of a second pass at a larger size."""


def make_request(
    body: Mapping[str, Any],
    config: ServeConfig,
    card: ModelCard,
    defaults: GenerationSettings,
    presets: Mapping[str, Preset] = {},
) -> Request:
    """Raises InvalidValueError, with the field's name, for what the model or the server does not take. `body` has
    numbers as text where it came as a form. `presets`: those of the model."""
    values: dict[str, Any] = {**config.common, "model": str(body["model"]), "prompt": _prompt(body, config)}
    values |= _size(body, card)
    for name, given in body.items():
        field = SAME_FIELDS.get(name, name)
        if given is None or given == "" or name in _HANDLED:
            continue
        if name in _LIMITED:
            _check_limited(name, given)
        elif field == "strength" and (card.starts_from_image or card.starts_from_video):
            values[field] = _strength(given)
        elif name in ("upscale_by", "tile"):
            values[name] = str(given)[:40]
        elif name in UPSCALE_FIELDS:
            values[name] = _number(name, given)
        elif field not in _SETTINGS:
            raise InvalidValueError(f"{name[:60]} is no field of this API; leave it out", field=name[:60])
        else:
            values[field] = _text(name, given, config) if field in _TEXTS else _number(name, given)
    if "num_frames" not in values and body.get("seconds") not in (None, ""):
        values["num_frames"] = _frames(body["seconds"], card, values.get("fps", defaults.fps))
    if body.get("control_strength") not in (None, ""):
        strengths = [each for given in _as_list(body["control_strength"]) for each in str(given).split(",")]
        values["control_strength"] = ",".join(str(_number("control_strength", each)) for each in strengths[:100])
    if body.get("preset") not in (None, ""):
        values["preset"] = _preset(body["preset"], presets, values["model"])
    if body.get("lora"):
        loras = _as_list(body["lora"])
        if len(loras) > LORAS_MAX:
            raise InvalidValueError(f"lora names {len(loras)} files, and {LORAS_MAX} are the most", field="lora")
        values["lora"] = [_lora(each, config) for each in loras]
    return Request(values)


_HANDLED = frozenset(("model", "prompt", "size", "seconds", "lora", "preset", "control_strength", "user", *FILE_FIELDS))


def rename_field(error: InvalidValueError, body: Mapping[str, Any]) -> InvalidValueError:
    """The error by the name that the client used, where a field has several."""
    if error.field in ("width", "height") and error.field not in body and body.get("size"):
        return type(error)(f"size={str(body['size'])[:40]}: {error}", field="size")
    for name, field in SAME_FIELDS.items():
        if error.field == field and name in body and field not in body:
            return type(error)(str(error).replace(field, name), field=name)
    return error


def _check_limited(name: str, given: Any) -> None:
    """`given` may be text: in a form everything is."""
    known = _LIMITED[name]
    if not isinstance(given, (str, int)) or str(given).lower() not in known:
        choices = f"leave it out, or send {' or '.join(known)}"
        raise InvalidValueError(f"{name}={str(given)[:40]!r} is not offered here; {choices}", field=name)


def _strength(given: Any) -> float:
    strength = _number("strength", given)
    if not 0 < strength <= 1:
        raise InvalidValueError(f"strength={str(given)[:40]} is not a number over 0, up to 1", field="strength")
    return float(strength)


def _preset(given: Any, presets: Mapping[str, Preset], model: str) -> str:
    name = given if isinstance(given, str) else ""
    if name != AUTO:
        find_preset(presets, name[:60], model)
    return name


def _text(name: str, given: Any, config: ServeConfig) -> str:
    most = config.limits.prompt_characters
    if not isinstance(given, str) or len(given) > most:
        raise InvalidValueError(f"{name} is no text of {most} characters at most", field=name)
    return given


def _prompt(body: Mapping[str, Any], config: ServeConfig) -> str:
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise InvalidValueError("prompt is missing; give one", field="prompt")
    if len(prompt) > config.limits.prompt_characters:
        raise InvalidValueError(
            f"prompt has {len(prompt)} characters, and {config.limits.prompt_characters} are the most; shorten it",
            field="prompt",
        )
    return prompt


def _size(body: Mapping[str, Any], card: ModelCard) -> dict[str, Any]:
    size = body.get("size")
    if size in (None, "", "auto"):
        return {}
    if isinstance(size, str) and size.upper() in card.sizes:
        # By name: its flow shift gives way to that of a preset, which a value of its own would not.
        return {"size": size.upper()}
    match = _SIZE.fullmatch(str(size))
    if match is None:
        names = "".join(f", {name}" for name in sorted(card.sizes))
        raise InvalidValueError(f"size={str(size)[:40]!r} is not a size; write 832x480{names}, or auto", field="size")
    return {"width": int(match[1]), "height": int(match[2])}


def _frames(seconds: Any, card: ModelCard, fps: int) -> int:
    """The number of frames that comes closest, of those that the model makes."""
    duration = _number("seconds", seconds)
    if not (0 < duration <= 3600 and 0 < fps < 10**6):
        raise InvalidValueError(f"seconds={str(seconds)[:40]} is no duration; give a number above 0", field="seconds")
    step = card.limits.frames_multiple
    return max(1, round(duration * fps / step) * step + 1) if step > 1 or card.limits.frames_max > 1 else 1


def _number(name: str, given: Any) -> int | float:
    for kind in (int, float):
        try:
            number = kind(str(given))
            is_usual = math.isfinite(number)
        except (ValueError, OverflowError):
            continue
        if is_usual and not isinstance(given, bool):
            return number
    raise InvalidValueError(f"{name}={str(given)[:40]!r} is no number", field=name)


def find_lora(name: str, config: ServeConfig) -> Path:
    """The path of a LoRA that the server was started with, by its name."""
    if config.lora_directory is None:
        raise InvalidValueError("lora is not offered here; leave it out", field="lora")
    path = config.lora_directory / f"{name.removesuffix('.safetensors')}.safetensors"
    is_name = _LORA_NAME.fullmatch(name) and len(path.name.encode()) < 256  # the longest that a disk knows
    if not is_name or not path.is_file() or path.resolve().parent != config.lora_directory.resolve():
        raise InvalidValueError(f"lora={name[:80]!r} is unknown here", field="lora")
    return path


def _lora(given: Any, config: ServeConfig) -> str:
    """The path of a LoRA, its strength, and for which of two transformers it is."""
    match = _LORA.fullmatch(str(given))
    path = find_lora(str(given).partition(":")[0], config)
    if match is None:
        raise InvalidValueError(
            f"lora={str(given)[:80]!r} is not NAME, NAME:STRENGTH, NAME:high or NAME:STRENGTH:low", field="lora"
        )
    strength = f":{_number('lora', match['strength'])}" if match["strength"] else ""
    return f"{path}{strength}{':' + match['noise'] if match['noise'] else ''}"


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
