"""What the stages of a pipeline exchange over a network: safetensors in memory, in the form of `artifacts.py`.

    text        positive.NAME, negative.NAME and shared.NAME as in the artifact; beyond the first of several prompts
                that follow each other, positive@1.NAME and so on, with their ranges in the metadata
    media       uint8: image.0, reference.0 and so on [height, width, 3]; video.NAME [frames, height, width, 3]; and
                picture.NAME [1, height, width, 3], one for all frames. Their strengths are in the metadata
    latents     latents [videos, channels, frames, height, width], float32
    frames      frames [videos, frames, height, width, 3], float32 in 0..1

Needs torch, and not jax. What others sent is checked here as far as that needs no model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES, ModelCard
from comfy_tpu.finite import is_finite
from comfy_tpu.json_input import parse_json
from comfy_tpu.pipeline.embeddings import Embeddings, PromptEmbeddings, TimedEmbeddings
from comfy_tpu.pipeline.given_media import GivenMedia, read_frames
from comfy_tpu.pipeline.video_files import Frames, VideoSource
from comfy_tpu.safetensors_input import SAFETENSORS_ERRORS

FORMAT = 2
"""Of the metadata, here and in `artifacts.py`."""
TENSORS_MAX = 512
_HEADER_BYTES_MAX = 2**20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_BRANCH = re.compile(r"(positive|negative|shared)(?:@([1-9][0-9]{0,2}))?\.(\w[\w-]*)")
_SETTINGS = frozenset(field.name for field in dataclasses.fields(GenerationSettings))

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class StageMessage:
    tensors: Tensors
    metadata: Mapping[str, str]

    def settings(self) -> GenerationSettings:
        """Raises InvalidValueError for other fields than those of the settings; values are checked with a model."""
        values = self.json("settings")
        if not isinstance(values, dict) or set(values) != _SETTINGS:
            odd = sorted(set(values) ^ _SETTINGS) if isinstance(values, dict) else ["settings"]
            raise InvalidValueError(
                f"settings differ in {', '.join(odd)[:200]}; use the same version of comfy-tpu on both sides",
                field="settings",
            )
        return GenerationSettings(**values)

    def json(self, name: str) -> Any:
        """A value of the metadata; None where it is absent."""
        text = self.metadata.get(name)
        if text is None:
            return None
        try:
            return parse_json(text)
        except ValueError as error:
            raise InvalidValueError(f"{name} of the metadata is not JSON", field=name) from error


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    described = {"format": str(FORMAT), **metadata}
    # Copies: safetensors refuse tensors that share memory, as those of one prompt in both branches do.
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, described)


def pack_settings(settings: GenerationSettings) -> str:
    return json.dumps(dataclasses.asdict(settings), ensure_ascii=False)


def unpack(content: bytes) -> StageMessage:
    """Raises InvalidValueError for what `pack` does not make."""
    header = check_header(content)
    try:
        return _check(load(content), header)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(error) from error


def read_message(path: Path) -> StageMessage:
    with path.open("rb") as file:
        header = check_header(file.read(8 + _HEADER_BYTES_MAX))
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            # Copies: a tensor that stays mapped to the file would change or crash with it.
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        return _check(tensors, header)
    except (*SAFETENSORS_ERRORS, ValueError, KeyError, TypeError) as error:
        raise _unreadable(error) from error


def check_header(content: bytes) -> dict[str, str]:
    """The metadata of safetensors that begin with `content`; raises InvalidValueError for anything else."""
    length = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    if not 2 <= length <= _HEADER_BYTES_MAX or len(content) < 8 + length:
        raise InvalidValueError("the body is not safetensors, and nothing else is read")
    try:
        header = parse_json(content[8 : 8 + length])
    except ValueError as error:
        raise InvalidValueError("the body is not safetensors: its header is not JSON") from error
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidValueError("the body's metadata are not texts by name")
    if len(header) > TENSORS_MAX:
        raise InvalidValueError(f"the body has {len(header)} tensors, and {TENSORS_MAX} are the most")
    if metadata.get("format") != str(FORMAT):
        raise InvalidValueError(
            f"the body has format {metadata.get('format', 'none')[:20]}, expected {FORMAT}: use the same version of "
            "comfy-tpu on both sides"
        )
    return metadata


def _check(tensors: Tensors, metadata: Mapping[str, str]) -> StageMessage:
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise InvalidValueError(f"{name[:60]} is {tensor.dtype}, expected floats or uint8")
        if not is_finite(tensor):
            raise InvalidValueError(f"{name[:60]} holds NaN or infinity")
    return StageMessage(tensors, metadata)


def _unreadable(error: Exception) -> InvalidValueError:
    if isinstance(error, InvalidValueError):
        return error
    return InvalidValueError(f"the body cannot be read as safetensors ({str(error)[:200]}); send it again")


def media_tensors(given: GivenMedia, card: ModelCard, settings: GenerationSettings) -> tuple[Tensors, dict[str, str]]:
    """The tensors and the metadata of given media. Videos are cut to the length of the result, and have its size, so
    that a server stretches them to the same pixels as this machine would."""
    tensors = {
        f"{kind}.{number}": torch.from_numpy(np.array(image.convert("RGB")))
        for kind, images in (("image", given.images), ("reference", given.references))
        for number, image in enumerate(images)
    }
    for name, source in given.videos.items():
        known = card.find_video(name)
        size = source.size if known is None or known.side_key else (settings.width, settings.height)
        kind = "picture" if source.is_picture else "video"
        tensors[f"{kind}.{name}"] = read_frames(source, name, settings, size)
    strengths = {"strength": given.strength, "control_strength": given.control_strength}
    return tensors, {name: json.dumps(value) for name, value in strengths.items() if value is not None}


def read_media(message: StageMessage) -> GivenMedia:
    """Raises InvalidValueError for tensors that are no media."""
    images: dict[str, list[Image.Image]] = {"image": [], "reference": []}
    videos: dict[str, VideoSource] = {}
    for full in sorted(message.tensors, key=lambda name: (len(name), name)):
        kind, _, name = full.partition(".")
        pixels = message.tensors[full]
        is_frames = kind in ("video", "picture") and name in VIDEO_NAMES and pixels.ndim == 4
        is_image = kind in images and pixels.ndim == 3 and name == str(len(images[kind]))
        if pixels.dtype != torch.uint8 or not (is_frames or is_image) or pixels.shape[-1] != 3 or not pixels.numel():
            raise InvalidValueError(
                "media are image.0, image.1 …, reference.0 … of shape [height, width, 3] and video.NAME of shape "
                "[frames, height, width, 3], uint8",
                field="image",
            )
        if is_image:
            images[kind].append(Image.fromarray(pixels.numpy()))
        else:
            videos[name] = Frames(pixels.numpy(), is_picture=kind == "picture")
    strength, control = message.json("strength"), message.json("control_strength")
    if strength is not None and not _is_number(strength):
        raise InvalidValueError("strength is no number", field="strength")
    if control is not None and not (isinstance(control, list) and all(map(_is_number, control))):
        raise InvalidValueError("control_strength is no list of numbers", field="control_strength")
    return GivenMedia(
        tuple(images["image"]),
        tuple(images["reference"]),
        videos,
        strength,
        None if control is None else tuple(control),
    )


def embedding_tensors(embeddings: PromptEmbeddings) -> tuple[Tensors, dict[str, str]]:
    """The tensors and the metadata of prompts and images."""
    timed = {"positive": embeddings.timed_positive, "negative": embeddings.timed_negative}
    branches: dict[str, Embeddings] = {"shared": embeddings.shared, "positive": embeddings.positive}
    if embeddings.negative is not None:
        branches["negative"] = embeddings.negative
    for branch, prompts in timed.items():
        branches |= {f"{branch}@{number}": each.embeddings for number, each in enumerate(prompts) if number}
    tensors = {f"{branch}.{name}": tensor for branch, named in branches.items() for name, tensor in named.items()}
    ranges = {branch: [[each.start, each.end] for each in prompts] for branch, prompts in timed.items() if prompts}
    return tensors, {"prompt": embeddings.prompt, "cut": embeddings.cut, "ranges": json.dumps(ranges)}


def read_embeddings(message: StageMessage) -> PromptEmbeddings:
    """Raises InvalidValueError for tensors that are no embeddings."""
    found: dict[str, dict[int, Tensors]] = {"positive": {}, "negative": {}, "shared": {}}
    for full, tensor in message.tensors.items():
        match = _BRANCH.fullmatch(full)
        is_bytes = tensor.dtype == torch.uint8 and match is not None and match[1] == "shared"  # pictures of faces
        is_numbers = tensor.dtype.is_floating_point or is_bytes
        if match is None or tensor.ndim < 2 or tensor.shape[0] != 1 or not is_numbers:
            raise InvalidValueError(f"{full[:60]} of shape {list(tensor.shape)} is no embedding of one prompt")
        found[match[1]].setdefault(int(match[2] or 0), {})[match[3]] = tensor
    if set(found["shared"]) - {0} or (0 not in found["positive"] and found["positive"]):
        raise InvalidValueError("the embeddings of the first prompt are missing")
    ranges = message.json("ranges") or {}
    if not isinstance(ranges, dict):
        raise InvalidValueError("ranges are no object", field="ranges")
    return PromptEmbeddings(
        message.metadata.get("prompt", ""),
        found["positive"].get(0, {}),
        found["negative"].get(0),
        message.metadata.get("cut", ""),
        found["shared"].get(0, {}),
        timed_positive=_read_timed("positive", found["positive"], ranges),
        timed_negative=_read_timed("negative", found["negative"], ranges),
    )


def _read_timed(branch: str, found: Mapping[int, Tensors], ranges: Mapping[str, Any]) -> tuple[TimedEmbeddings, ...]:
    given = ranges.get(branch, [])
    if not isinstance(given, list):
        raise InvalidValueError(f"ranges of the {branch} prompts are no list", field="ranges")
    numbers = list(range(len(given)))
    if (numbers or [0]) != sorted(found) and not (not found and not numbers):
        raise InvalidValueError(f"ranges of the {branch} prompts do not fit their number", field="ranges")
    for each in given:
        is_range = isinstance(each, list) and len(each) == 2 and all(_is_share(value) for value in each)
        if not is_range or each[0] > each[1]:
            raise InvalidValueError(f"ranges of the {branch} prompts are not pairs from 0 to 1", field="ranges")
    return tuple(TimedEmbeddings(start, end, found[number]) for number, (start, end) in enumerate(given))


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
