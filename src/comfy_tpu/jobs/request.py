"""A request as data: what one call of `comfy-tpu generate` would be told, and the identity of its result."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from comfy_tpu.config import Lora, LoraNoise
from comfy_tpu.families.card import VIDEO_NAMES, ModelCard

RESULT_VERSION = 3
"""Part of every identity. To be increased when the same request gives another video, so that finished jobs are done
again; the versions of torch and jax move the last bits only, and are not part of it."""

DEFAULT_MODEL = "demo"

MACHINE_FIELDS = frozenset(
    ("mesh", "platform", "cache_dir", "attention", "attention_blocks", "dense_max_tokens", "output", "contact_sheet")
)
"""Fields that change where or how fast a video is made, or what it is called, and not what it shows."""

MEDIA_FIELDS = ("image", "last_image", "reference", *VIDEO_NAMES)
"""Fields that name given images and videos."""

INPUT_FIELDS = (*MEDIA_FIELDS, "lora")
"""Fields that name input files that are no part of the model."""

FILE_FIELDS = (*INPUT_FIELDS, "transformer", "text_encoder", "vae", "image_encoder", "tiny_vae", "interpolation_model")
"""Fields that name input files."""

MODEL_FIELDS = (
    *("model", "transformer", "text_encoder", "vae", "image_encoder"),
    *("mesh", "platform", "dtype", "quantize", "cache_dir", "vae_backend", "tiny_vae", "ignore_config_key"),
    *("attention", "attention_window", "attention_blocks", "dense_max_tokens", "fast"),
)
"""Fields that decide which model is opened, and how. A model changes where one of them does."""

PER_ROW_FIELDS = frozenset(("prompt", "negative_prompt", "seed", "output"))
"""Fields in which requests that share a step may differ."""

Fingerprint = Callable[[str], str]
"""A text that changes when the model, or the file, of this name does."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The chosen values by field, as JSON has them; what is not chosen is the model's default."""

    values: Mapping[str, Any]

    @property
    def prompt(self) -> str:
        return str(self.values["prompt"])

    @property
    def model(self) -> str:
        return str(self.values.get("model", DEFAULT_MODEL))

    @property
    def output(self) -> str | None:
        """The name of the output inside the batch's directory; None: made of the prompt and the identity."""
        return self.values.get("output")

    @property
    def model_key(self) -> str:
        """Equal for requests that one opened model serves."""
        return _digest({name: self.values[name] for name in MODEL_FIELDS if name in self.values})

    @property
    def shape_key(self) -> str:
        """Equal for requests that run the same programs and may share a step."""
        return _digest({name: value for name, value in self.values.items() if name not in PER_ROW_FIELDS})

    def identity(self, model_fingerprint: str, file_fingerprint: Fingerprint) -> str:
        """Equal for requests whose videos are the same."""
        values = dict(self.values)
        if values.get("vae_backend") != "tiny":
            values.pop("tiny_vae", None)  # previews alone show it
        decisive = {name: value for name, value in values.items() if _is_decisive(name, value)}
        files: dict[str, list[Any]] = {
            name: [file_fingerprint(each) for each in _as_list(values[name])]
            for name in FILE_FIELDS
            if name in values and name != "lora"
        }
        if "lora" in values:
            parts = [split_lora(each) for each in _as_list(values["lora"])]
            files["lora"] = [[file_fingerprint(address), chosen] for address, chosen in parts]
        return _digest({**decisive, **files, "model": model_fingerprint, "version": RESULT_VERSION})

    def input_files(self) -> list[str]:
        """The files and addresses that the request names, besides its model."""
        named = {name: _as_list(self.values.get(name, [])) for name in FILE_FIELDS}
        loras = [split_lora(each)[0] for each in named.pop("lora")]
        return [*itertools.chain.from_iterable(named.values()), *loras]

    def to_json(self) -> str:
        return json.dumps(self.values, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Request:
        return cls(json.loads(text))


def runs_alone(card: ModelCard, values: Mapping[str, Any]) -> bool:
    """Whether a request shares its steps with no other."""
    samples = card.starts_from_image and "image" in values  # an image to start from is sampled with each seed's noise
    own = ("contact_sheet", "num_videos", "stage", "upscale")
    return samples or card.makes_segments or any(name in values for name in own)


def default_output(request: Request, identity: str, suffix: str) -> str:
    """A file name that a person can tell from others: words of the prompt, and the beginning of the identity."""
    plain = unicodedata.normalize("NFKC", request.prompt).casefold()
    words = "-".join(re.findall(r"\w+", plain))
    while len(words.encode()) > 60:  # in bytes: a file name has 255
        words = words[:-1]
    return f"{words.rstrip('-') or 'video'}-{identity[:10]}{suffix}"


def parse_lora(text: str) -> Lora:
    """PATH[:STRENGTH][:NOISE] as a `Lora`. Values that are no numbers stay text, for the common check to refuse."""
    path, chosen = split_lora(text)
    return Lora(Path(path), **chosen)


def split_lora(text: str) -> tuple[str, dict[str, Any]]:
    """The path or address of a LoRA, and its strength and noise where they are given."""
    if _is_file(text):  # colons may be part of a path
        return text, {}
    path, chosen = text, dict[str, Any]()
    for _ in range(2):  # in either order
        rest, _, last = path.rpartition(":")
        if rest and last in get_args(LoraNoise) and "noise" not in chosen:
            chosen["noise"] = last
        elif rest and "strength" not in chosen and (_is_number(last) or rest.endswith(".safetensors")):
            chosen["strength"] = float(last) if _is_number(last) else last
        else:
            break
        path = rest
    return path, chosen


def _is_decisive(name: str, value: Any) -> bool:
    """Whether the field decides what a video shows. Of the attention kernels one rounds."""
    return name not in MACHINE_FIELDS or (name, value) == ("attention", "int8")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or no path at all
        return False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
