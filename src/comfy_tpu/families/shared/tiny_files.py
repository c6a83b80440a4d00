"""Recognises the published files of tiny decoders by their names and shapes.

A decoder's layers are numbered. Files differ in what stands before the number: nothing in TAESD's own decoder files,
`decoder.` in TAEHV's, `decoder.layers.` in diffusers' of TAESD, which do not count the first layer, `taesd_decoder.` in
checkpoints of ComfyUI.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from comfy_tpu.compiler.recorded_tensors import RecordedSource, Tensors, record_tensors
from comfy_tpu.compiler.weights import WeightSource
from comfy_tpu.errors import CheckpointError, join_names
from comfy_tpu.families.shared.tiny_decoders import SPATIAL_SCALE

_LAYER = re.compile(r"(?:(?P<diffusers>decoder\.layers\.)|taesd_decoder\.|decoder\.|)(?P<number>\d+)\.(?P<rest>.+)")
_IMAGE_END, _VIDEO_END = "19.weight", "22.weight"
_PUBLISHED = "taesd, taef1, taef2, taehv, taew2_1, taew2_2, taeltx or lighttae"
_LIGHT = "lighttae"
"""The beginning of the names of LightX2V's files, which have the names and shapes of TAEHV's, and are trained on the
VAE's own scale of latents. Nothing in a file tells the two apart."""
_LIGHT_SLOPE = 0.2
_SIGNED_CHANNELS = 32
"""Of HunyuanVideo-1.5, whose file of LightX2V also has another activation, and pixels in -1..1."""


@dataclasses.dataclass(frozen=True)
class TinyFile:
    """A file with a tiny decoder: its tensors under the decoder's names, and its configuration."""

    source: WeightSource
    config: Mapping[str, Any]

    @property
    def makes_videos(self) -> bool:
        return self.config["kind"] != "image"

    @property
    def channels(self) -> int:
        return int(self.config["channels"])

    @property
    def spatial_scale(self) -> int:
        """Pixels per latent on a side."""
        return SPATIAL_SCALE * int(self.config["output_patch"])

    @property
    def temporal_scale(self) -> int:
        """Frames per latent, except the first."""
        return math.prod(self.config["strides"])


def read_tiny_file(source: WeightSource) -> TinyFile:
    """Raises CheckpointError for a file of another kind. Reads headers only."""
    tensors: Tensors = {}
    for name, tensor in record_tensors(source).items():
        if (match := _LAYER.fullmatch(name)) is not None:
            number = int(match["number"]) + (1 if match["diffusers"] else 0)
            tensors[f"{number}.{match['rest']}"] = tensor
    if _VIDEO_END not in tensors and _IMAGE_END not in tensors:
        raise CheckpointError(
            f"{source.path} holds no tiny decoder: it has {join_names(list(source.tensors), 3)}; use a safetensors "
            f"file of {_PUBLISHED}"
        )
    try:
        config = _read_video(tensors) if _VIDEO_END in tensors else _read_image(tensors)
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{source.path} is not a whole tiny decoder ({type(error).__name__}: {error}); download it again"
        ) from error
    if _LIGHT in source.path.name.lower() and config["kind"] == "video":
        is_signed = config["channels"] == _SIGNED_CHANNELS
        config |= {"reads_vae_scale": True, "is_signed": is_signed, "slope": _LIGHT_SLOPE if is_signed else 0.0}
    named = {f"decoder.{name}": tensor for name, tensor in tensors.items()}
    return TinyFile(RecordedSource(source, named), config)


def limit_frames(file: TinyFile, temporal_scale: int) -> TinyFile:
    """The decoder with as many frames per latent as the model's: where a file has more, its first layers that multiply
    them give the last frame only, as the authors' own code reads such files."""
    strides, tensors = list(file.config["strides"]), record_tensors(file.source)
    for level, name in enumerate(file.config["growing"]):
        if math.prod(strides) > temporal_scale and strides[level] > 1:
            weight = tensors[f"decoder.{name}"]
            tensors[f"decoder.{name}"] = weight[-weight.shape[1] :]
            strides[level] = 1
    if strides == file.config["strides"]:
        return file
    return TinyFile(RecordedSource(file.source, tensors), {**file.config, "strides": strides})


_DEFAULTS: Mapping[str, Any] = {
    "input_patch": 1,
    "output_patch": 1,
    "strides": [1],
    "growing": [],
    "pools": False,
    "slope": 0.0,
    "reads_vae_scale": False,
    "is_signed": False,
}


def _read_image(tensors: Tensors) -> dict[str, Any]:
    first = tensors["1.weight"].shape
    return {
        **_DEFAULTS,
        "kind": "image",
        "channels": first[1],
        "widths": [first[0], *(tensors[f"{number}.weight"].shape[0] for number in (7, 12, 17))],
        "pools": "3.pool.0.weight" in tensors,
    }


def _read_video(tensors: Tensors) -> dict[str, Any]:
    is_wide = "0.weight" in tensors
    first = tensors["0.weight" if is_wide else "1.weight"].shape
    growing = [f"{number}.conv.weight" for number in ((7, 14, 21) if is_wide else (7, 13, 19))]
    grown = [tensors[name].shape for name in growing]
    later = (
        [shape[1] for shape in grown] if is_wide else [tensors[f"{number}.weight"].shape[0] for number in (8, 14, 20)]
    )
    return {
        **_DEFAULTS,
        "kind": "wide_video" if is_wide else "video",
        "channels": first[1],
        "widths": [first[0], *later],
        "strides": [shape[0] // shape[1] for shape in grown],
        "growing": growing,
        "output_patch": math.isqrt(tensors[_VIDEO_END].shape[0] // 3),
    }
