"""The control of Wan VACE: a video, a mask on it, and reference images, as latents beside the noise.

Of every frame the VAE sees what is kept and what is made anew, each with gray in place of the other. A mask is white
where something is made anew; frames that are not given are gray, and all white. Reference images are latent frames
before those of the video.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.media import Clip, Clips, FittedMedia, as_pixels, to_pixels
from comfy_tpu.families.model_family import MediaEncoding
from comfy_tpu.families.wan import text as wan_text
from comfy_tpu.families.wan.vae import SPATIAL_SCALE, TEMPORAL_SCALE

_WHITE = 255


def clips(media: FittedMedia, settings: GenerationSettings, config: Config) -> Clips:
    frames, mask = _control_video(media, settings)
    count = (settings.num_frames - 1) // TEMPORAL_SCALE + 1

    def parts(is_new: bool) -> Iterator[torch.Tensor]:
        for index in range(count):
            begin = (index - 1) * TEMPORAL_SCALE + 1 if index else 0
            part = slice(begin, begin + (TEMPORAL_SCALE if index else 1))
            is_masked = (mask[part] > 0.5 * _WHITE)[None, None]
            yield _pixels(frames, part, settings) * (is_masked if is_new else ~is_masked)

    references = {
        f"reference {number}": Clip((fit_reference(image, settings),), 1)
        for number, image in enumerate(media.references)
    }
    if not frames:  # gray alone is the same, kept or made anew
        return {"kept": Clip(parts(is_new=False), count), **references}
    return {"kept": Clip(parts(is_new=False), count), "new": Clip(parts(is_new=True), count), **references}


def condition(
    latents: Mapping[str, Sequence[torch.Tensor]], media: FittedMedia, settings: GenerationSettings, config: Config
) -> dict[str, torch.Tensor]:
    """The control [1, channels, frames, height, width], and the strength of each of its layers [1, layers]."""
    kept = torch.cat(tuple(latents["kept"]), dim=2)
    new = torch.cat(tuple(latents["new"]), dim=2) if "new" in latents else kept
    control = torch.cat((kept, new, _mask_channels(_control_video(media, settings)[1])), dim=1)
    for number in range(len(media.references)):  # the last one comes first, as in diffusers
        (reference,) = latents[f"reference {number}"]
        channels = control.shape[1] - reference.shape[1]
        front = torch.cat((reference, reference.new_zeros(1, channels, *reference.shape[2:])), dim=1)
        control = torch.cat((front, control), dim=2)
    return {"control": control, "control_scale": torch.tensor([media.control_strength])}


def _control_video(media: FittedMedia, settings: GenerationSettings) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """The given frames, uint8 [height, width, 3] by number, and the mask of all frames, uint8 [frames, height,
    width]."""
    mask = torch.full((settings.num_frames, settings.height, settings.width), _WHITE, dtype=torch.uint8)
    if media.images:
        places = (0, settings.num_frames - 1)[: len(media.images)]
        fitted = (image.resize((settings.width, settings.height), Image.Resampling.LANCZOS) for image in media.images)
        mask[list(places)] = 0
        return dict(zip(places, (torch.from_numpy(np.array(image)) for image in fitted), strict=True)), mask
    video = media.videos.get("video")
    if video is None:
        return {}, mask
    if "mask" in media.videos:
        mask[: len(video)] = media.videos["mask"]
    return dict(enumerate(video)), mask


def _pixels(frames: Mapping[int, torch.Tensor], part: slice, settings: GenerationSettings) -> torch.Tensor:
    """[1, 3, frames, height, width] in -1..1, gray where no frame is given."""
    pixels = torch.zeros(1, 3, part.stop - part.start, settings.height, settings.width)
    for place, number in enumerate(range(part.start, part.stop)):
        if number in frames:
            pixels[:, :, place] = to_pixels(frames[number][None])[:, :, 0]
    return pixels


def _mask_channels(mask: torch.Tensor) -> torch.Tensor:
    """A channel for each of the pixels of a latent, of one frame for each latent: [1, 64, latent frames, …] in 0..1."""
    count = (len(mask) + TEMPORAL_SCALE - 1) // TEMPORAL_SCALE
    numbers = torch.arange(len(mask)).float()[None, None]
    # Which frame stands for the four of a latent: torch's own rounding.
    chosen = F.interpolate(numbers, size=count, mode="nearest-exact")[0, 0].long()
    pixels = mask[chosen].float() / _WHITE
    tiles = pixels.unflatten(2, (-1, SPATIAL_SCALE)).unflatten(1, (-1, SPATIAL_SCALE))
    return tiles.permute(2, 4, 0, 1, 3).flatten(0, 1).unsqueeze(0)


def fit_reference(image: Image.Image, settings: GenerationSettings) -> torch.Tensor:
    """A reference image on a white frame, as large as it fits: [1, 3, 1, height, width] in -1..1."""
    multiple = [max(side - side % SPATIAL_SCALE, SPATIAL_SCALE) for side in image.size]
    pixels = as_pixels(image.resize((multiple[0], multiple[1]), Image.Resampling.LANCZOS))[:, :, 0]
    height, width = pixels.shape[2:]
    scale = min(settings.height / height, settings.width / width)
    rows, columns = max(int(height * scale), 1), max(int(width * scale), 1)
    fitted = F.interpolate(pixels, size=(rows, columns), mode="bilinear", align_corners=False)
    top, left = (settings.height - rows) // 2, (settings.width - columns) // 2
    frame = torch.ones(1, 3, 1, settings.height, settings.width)
    frame[:, :, 0, top : top + rows, left : left + columns] = fitted
    return frame


def control_layers(config: Config) -> int:
    return len(config["vace_layers"])


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    """The shapes of the text's embeddings, and those of a control without reference images."""
    frames = (settings.num_frames - 1) // TEMPORAL_SCALE + 1
    sides = settings.height // SPATIAL_SCALE, settings.width // SPATIAL_SCALE
    return {
        **wan_text.embedding_shapes(config, settings),
        "control": (config["vace_in_channels"], frames, *sides),
        "control_scale": (control_layers(config),),
    }


CONTROL_ENCODING = MediaEncoding(
    clips,
    condition,
    encodes_nothing=True,
    frames_from="control",
    control_layers=control_layers,
)
