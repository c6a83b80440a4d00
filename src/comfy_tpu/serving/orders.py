"""From what a client said, in OpenAI's words and ours, to a request of the ledger."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ModelCard
from comfy_tpu.jobs.request import Request
from comfy_tpu.serving.config import ServeConfig

IGNORED = frozenset(
    ("user", "quality", "style", "background", "moderation", "output_compression", "output_format", "stream")
)
"""Fields of OpenAI's API that mean nothing here, and do no harm."""
_SETTINGS = {field.name: field.type for field in dataclasses.fields(GenerationSettings)}
SAME_FIELDS = {"steps": "num_inference_steps", "guidance": "guidance_scale", "frames": "num_frames"}
"""Other names of settings."""
_TEXTS = frozenset(name for name, kind in _SETTINGS.items() if kind == "str")
_SIZE = re.compile(r"^([1-9][0-9]{0,4})x([1-9][0-9]{0,4})$")
_LORA_NAME = re.compile(r"[\w][\w .+-]*")
LORAS_MAX = 16


def make_request(
    body: Mapping[str, Any], config: ServeConfig, card: ModelCard, defaults: GenerationSettings, images: Sequence[Path]
) -> Request:
    """Raises InvalidValueError, with the field's name, for what the model or the server does not take. `body` has
    numbers as text where it came as a form."""
    values: dict[str, Any] = {**config.common, "model": str(body["model"]), "prompt": _prompt(body, config)}
    for name, given in body.items():
        field = SAME_FIELDS.get(name, name)
        if given is None or given == "" or name in IGNORED or name in _HANDLED:
            continue
        if field not in _SETTINGS:
            raise InvalidValueError(f"{name[:60]} is no field of this API; leave it out", field=name[:60])
        values[field] = _text(name, given, config) if field in _TEXTS else _number(name, given)
    values |= _size(body)
    if "num_frames" not in values and body.get("seconds") not in (None, ""):
        values["num_frames"] = _frames(body["seconds"], card, values.get("fps", defaults.fps))
    if images:
        values["image"] = [str(path) for path in images]
    if body.get("lora"):
        loras = _as_list(body["lora"])
        if len(loras) > LORAS_MAX:
            raise InvalidValueError(f"lora names {len(loras)} files, and {LORAS_MAX} are the most", field="lora")
        values["lora"] = [_lora(each, config) for each in loras]
    return Request(values)


_HANDLED = frozenset(("model", "prompt", "size", "seconds", "n", "response_format", "lora", "image", "input_reference"))


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


def _size(body: Mapping[str, Any]) -> dict[str, int]:
    size = body.get("size")
    if size in (None, "", "auto"):
        return {}
    match = _SIZE.fullmatch(str(size))
    if match is None:
        raise InvalidValueError(f"size={str(size)[:40]!r} is not a size; write 832x480, or auto", field="size")
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
    """The path of a LoRA, and its strength."""
    name, _, strength = str(given).partition(":")
    path = find_lora(name, config)
    return f"{path}:{_number('lora', strength)}" if strength else str(path)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
