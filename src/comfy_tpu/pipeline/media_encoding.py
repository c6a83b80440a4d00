"""From given images and videos to embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.config import MESH_AXES, GenerationSettings
from comfy_tpu.families.media import Clip, Clips, FittedMedia, as_frame, gray_video, to_pixels
from comfy_tpu.pipeline.checks import check_finite
from comfy_tpu.pipeline.images import as_rgb, as_values
from comfy_tpu.pipeline.initial import INITIAL, initial_embeddings
from comfy_tpu.pipeline.noise import image_noise
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.step import latent_shape
from comfy_tpu.pipeline.vae_backend import split_columns


def encode_media(
    running: RunningModel, media: FittedMedia, settings: GenerationSettings, strength: float
) -> dict[str, torch.Tensor]:
    """Embeddings by name, the same for every branch of guidance. `strength`: of an image or video to start from."""
    family, encoding = running.family, running.family.media
    if family.card.starts_from_image:
        return initial_embeddings(_sample_image(running, media, settings), strength)
    assert encoding is not None
    config = running.files.config(family.transformer)
    embedded: dict[str, torch.Tensor] = {}
    if encoding.encoder is not None and encoding.embed is not None:
        values = as_values(running.files.image_processor(encoding.processor), media.images)
        embed = running.program(encoding.encoder, encoding.embed)
        with running.weights(encoding.encoder) as weights:
            running.report("encoding", "image", 0, 1)
            embedded |= {name: to_host(array) for name, array in embed(weights, pixel_values=values).items()}
        check_finite(f"the {encoding.encoder.name}", embedded, running.dtype_name)
    latents = encode_clips(running, encoding.clips(media, settings, config))
    made = embedded | encoding.condition(latents, media, settings, config)
    return {**made, **initial_embeddings(made[INITIAL], strength)} if INITIAL in made else made


def encode_first_frame(running: RunningModel, image: Image.Image, settings: GenerationSettings) -> torch.Tensor:
    """The transformer's latents of a video of one frame, [1, channels, 1, height, width]."""
    single = dataclasses.replace(settings, num_frames=1)
    (latents,) = encode_clips(running, {"first frame": gray_video([as_rgb(image)], single, 1)})["first frame"]
    return latents


def encode_frames(running: RunningModel, frames: npt.NDArray[np.uint8], settings: GenerationSettings) -> torch.Tensor:
    """The transformer's latents of a whole video, [1, channels, frames, height, width]. `frames`: [frames, height,
    width, 3], resized part by part."""
    vae, scale = running.family.vae, running.family.card.temporal_scale
    starts = range(1) if vae.decodes_all_frames else (0, *range(1, len(frames), scale))
    ends = (*starts[1:], len(frames))
    parts = (_resize(frames[start:end], settings) for start, end in zip(starts, ends, strict=True))
    latents = encode_clips(running, {"video": Clip(map(to_pixels, parts), len(starts))})["video"]
    return torch.cat(latents, dim=2)


def _resize(frames: npt.NDArray[np.uint8], settings: GenerationSettings) -> torch.Tensor:
    size = settings.width, settings.height
    resized = (np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS)) for frame in frames)
    return torch.from_numpy(np.stack(tuple(resized)))


def encode_clips(running: RunningModel, clips: Clips) -> dict[str, list[torch.Tensor]]:
    """The latents of each clip, frame by frame, on the host."""
    vae, spec = running.vae, running.family.vae.component
    assert vae.encode_frames is not None
    total, done = sum(clip.count for clip in clips.values()), 0
    latents: dict[str, list[torch.Tensor]] = {}
    with running.weights(spec) as weights:
        for name, clip in clips.items():
            cache, latents[name] = None, []
            for pixels in clip.parts:
                columns = pixels.shape[-1] // running.family.card.spatial_scale
                axes = split_columns(vae.encode_axes, columns, running.placement)
                encode = running.program(spec, vae.encode_frames, input_axes=axes, donate=("cache",))
                latent, cache = encode(weights, pixels=pixels, cache=cache)
                latents[name].append(to_host(latent))
                done += 1
                running.report("encoding", "image", done, total)
            _check_latents(running, name, latents[name])
    return latents


def _check_latents(running: RunningModel, name: str, latents: Sequence[torch.Tensor]) -> None:
    check_finite(
        "the VAE's encoder",
        {f"part {index} of {name}": latent for index, latent in enumerate(latents)},
        running.dtype_name,
    )


def _sample_image(running: RunningModel, media: FittedMedia, settings: GenerationSettings) -> torch.Tensor:
    """A sample of the latents of an image to start from, drawn with the noise of the seed."""
    family = running.family
    assert family.vae.encode_image is not None
    columns = settings.width // family.card.spatial_scale
    axes = split_columns({"image": (None, None, MESH_AXES)}, columns, running.placement)
    program = running.program(family.vae.component, family.vae.encode_image, input_axes=axes)
    noise, _ = image_noise(latent_shape(family, running.files.latent_channels, settings), settings.seed)
    with running.weights(family.vae.component) as weights:
        latents = to_host(program(weights, image=as_frame(media.images[0], settings), noise=noise))
    check_finite("the VAE's encoder", {"latents": latents}, running.dtype_name)
    return latents
