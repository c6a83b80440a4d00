"""What Wan Animate is given: a person's image, poses and faces; and a video in which the person replaces another.

A video is made segment by segment. Each reads the image as a latent frame before its own, and beside the noise a video
that begins with the last frames of the segment before; the rest is gray, or the background where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.families.card import Config
from comfy_tpu.families.media import Clip, Clips, FittedMedia, as_pixels, video_clip
from comfy_tpu.families.model_family import MediaEncoding, SegmentEncoding
from comfy_tpu.families.wan import card
from comfy_tpu.families.wan import image as wan_image
from comfy_tpu.families.wan import text as wan_text
from comfy_tpu.families.wan.vae import SPATIAL_SCALE, TEMPORAL_SCALE


def _padded_length(settings: GenerationSettings) -> int:
    """Frames of all segments, without those that two have in common."""
    step = settings.context_frames - settings.context_overlap
    return card.WAN_ANIMATE.segment_count(settings) * step + settings.context_overlap


def _padded(frames: torch.Tensor, settings: GenerationSettings) -> torch.Tensor:
    """The frames of all segments: beyond its end a video goes back, and forth again."""
    last = len(frames) - 1
    numbers = torch.arange(_padded_length(settings)) % max(2 * last, 1)
    return frames[torch.where(numbers > last, 2 * last - numbers, numbers)]


def _segment(number: int, settings: GenerationSettings) -> slice:
    start = number * (settings.context_frames - settings.context_overlap)
    return slice(start, start + settings.context_frames)


def clips(media: FittedMedia, settings: GenerationSettings, config: Config) -> Clips:
    poses = _padded(media.videos["pose_video"], settings)
    segments = range(card.WAN_ANIMATE.segment_count(settings))
    return {
        "reference": Clip((fit_reference(media.images[0], settings),), 1),
        **{f"pose {each}": video_clip(poses[_segment(each, settings)], TEMPORAL_SCALE) for each in segments},
    }


def condition(
    latents: Mapping[str, Sequence[torch.Tensor]], media: FittedMedia, settings: GenerationSettings, config: Config
) -> dict[str, torch.Tensor]:
    (reference,) = latents["reference"]
    poses = [frame for name, frames in latents.items() if name != "reference" for frame in frames]
    made = {
        "reference": torch.cat((torch.ones(1, TEMPORAL_SCALE, *reference.shape[2:]), reference), dim=1),
        "poses": torch.cat(poses, dim=2),
        "faces": _channels_first(_padded(media.videos["face_video"], settings)),
    }
    if "background_video" not in media.videos:
        return made
    masks = _padded(media.videos["mask"], settings).float() / 255
    sides = (settings.height // SPATIAL_SCALE, settings.width // SPATIAL_SCALE)
    kept = F.interpolate(1 - masks[:, None], size=sides, mode="nearest")  # as diffusers: 1 where the background stays
    background = _channels_first(_padded(media.videos["background_video"], settings))
    return made | {"background": background, "background_mask": kept.transpose(0, 1)[None]}


def _channels_first(frames: torch.Tensor) -> torch.Tensor:
    """uint8 [frames, height, width, 3] -> [1, 3, frames, height, width]"""
    return frames.permute(3, 0, 1, 2)[None].contiguous()


def fit_reference(image: Image.Image, settings: GenerationSettings) -> torch.Tensor:
    """The image on a black frame, as large as it fits: [1, 3, 1, height, width] in -1..1."""
    width, height = settings.width, settings.height
    is_wider = width / height < image.width / image.height
    columns = width if is_wider else image.width * height // image.height
    rows = image.height * width // image.width if is_wider else height
    frame = Image.new("RGB", (width, height))
    fitted = image.resize((max(columns, 1), max(rows, 1)), Image.Resampling.LANCZOS)
    frame.paste(fitted, box=(width // 2 - columns // 2, height // 2 - rows // 2))
    return as_pixels(frame)


def segment_clips(
    given: Mapping[str, torch.Tensor], number: int, previous: torch.Tensor | None, settings: GenerationSettings
) -> Clips:
    """The video beside the noise of a segment."""
    segment = _segment(number, settings)
    frames, overlap = settings.context_frames, settings.context_overlap
    background = given["background"][:, :, segment] if "background" in given else None
    rows = 1 if previous is None else previous.shape[0]

    def pixels(begin: int, end: int) -> torch.Tensor:
        shown = torch.zeros(rows, 3, end - begin, settings.height, settings.width)
        if background is not None:
            shown = (background[:, :, begin:end].float() / 255.0 * 2.0 - 1.0).expand(rows, -1, -1, -1, -1).clone()
        if previous is not None and begin < overlap:
            shown[:, :, : overlap - begin] = previous[:, :, begin : min(end, overlap)]
        return shown

    def parts() -> Iterator[torch.Tensor]:
        yield pixels(0, 1)
        for begin in range(1, frames, TEMPORAL_SCALE):
            yield pixels(begin, begin + TEMPORAL_SCALE)

    return {"video": Clip(parts(), (frames - 1) // TEMPORAL_SCALE + 1)}


def segment_condition(
    latents: Mapping[str, Sequence[torch.Tensor]],
    given: Mapping[str, torch.Tensor],
    number: int,
    settings: GenerationSettings,
) -> dict[str, torch.Tensor]:
    """The embeddings of a segment, as `embedding_shapes` has them."""
    segment, count = _segment(number, settings), (settings.context_frames - 1) // TEMPORAL_SCALE + 1
    video = torch.cat(tuple(latents["video"]), dim=2)
    mask = torch.zeros(1, 1, settings.context_frames, *video.shape[3:])
    if "background_mask" in given:
        mask = given["background_mask"][:, :, segment].float().clone()
    if number:
        mask[:, :, : settings.context_overlap] = 1
    # The first latent holds one frame, which counts for all four.
    channels = torch.cat((mask[:, :, :1].expand(-1, -1, TEMPORAL_SCALE, -1, -1), mask[:, :, 1:]), dim=2)
    channels = channels.unflatten(2, (-1, TEMPORAL_SCALE)).transpose(2, 3)[:, 0]
    rows = video.shape[0]
    beside = torch.cat((channels.expand(rows, -1, -1, -1, -1), video), dim=1)
    return {
        "image": given["image"],
        "condition": torch.cat((given["reference"].expand(rows, -1, -1, -1, -1), beside), dim=2),
        "pose": given["poses"][:, :, number * count : (number + 1) * count],
        "face": given["faces"][:, :, segment],
    }


def _latent_channels(config: Config) -> int:
    return int(config.get("latent_channels", 16))  # not in each config.json: diffusers' default


def embedding_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    """Of one segment."""
    frames = (settings.context_frames - 1) // TEMPORAL_SCALE + 1
    sides = settings.height // SPATIAL_SCALE, settings.width // SPATIAL_SCALE
    side = config["motion_encoder_size"]
    return {
        **wan_text.embedding_shapes(config, settings),
        "image": (257, config["image_dim"]),
        "condition": (config["in_channels"] - config["out_channels"], frames + 1, *sides),
        "pose": (_latent_channels(config), frames, *sides),
        "face": (3, settings.context_frames, side, side),
    }


def given_shapes(config: Config, settings: GenerationSettings) -> dict[str, tuple[int, ...]]:
    """Of the whole video, and of a background, which need not be there."""
    frames = _padded_length(settings)
    sides = settings.height // SPATIAL_SCALE, settings.width // SPATIAL_SCALE
    side = config["motion_encoder_size"]
    return {
        **wan_text.embedding_shapes(config, settings),
        "image": (257, config["image_dim"]),
        "reference": (TEMPORAL_SCALE + _latent_channels(config), 1, *sides),
        "poses": (_latent_channels(config), card.WAN_ANIMATE.latent_frames(settings), *sides),
        "faces": (3, frames, side, side),
        "background": (3, frames, settings.height, settings.width),
        "background_mask": (1, frames, *sides),
    }


ANIMATE_ENCODING = MediaEncoding(
    clips,
    condition,
    encoder=wan_image.IMAGE_ENCODER,
    embed=wan_image.embed_image,
    optional_embeddings=("background", "background_mask"),
    segments=SegmentEncoding(given_shapes, segment_clips, segment_condition),
    frames_from="condition",
)
