"""From images to embeddings: first frames, last frames, and reference images."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.config import MESH_AXES, GenerationSettings
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.pipeline.checks import check_finite
from comfy_tpu.pipeline.images import as_pixels, as_rgb, as_values, crop_to_frame, video_parts
from comfy_tpu.pipeline.init_image import InitImage
from comfy_tpu.pipeline.noise import image_noise
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.step import latent_shape
from comfy_tpu.pipeline.vae_backend import split_columns


def fit_images(family: ModelFamily, images: Sequence[Image.Image], settings: GenerationSettings) -> list[Image.Image]:
    """RGB images in the sizes that the family takes; raises InvalidValueError for an image that cannot be used. Images
    that are stretched to the frame keep their sizes here."""
    images = [as_rgb(image) for image in images]
    if family.image is not None and family.image.fit_reference is not None:
        return [family.image.fit_reference(image) for image in images]
    if family.image is not None and family.image.fit_frame is not None:
        return [family.image.fit_frame(image, settings) for image in images]
    crops = family.card.image is not None and family.card.image.resize == "crop"
    return [crop_to_frame(image, settings) for image in images] if crops else images


def encode_images(
    running: RunningModel, images: Sequence[Image.Image], settings: GenerationSettings
) -> dict[str, torch.Tensor]:
    """Embeddings by name, the same for every branch of guidance."""
    family, encoding = running.family, running.family.image
    assert encoding is not None
    assert running.vae.encode_frames is not None
    images = fit_images(family, images, settings)
    embedded: dict[str, torch.Tensor] = {}
    if encoding.encoder is not None and encoding.embed is not None:
        values = as_values(running.files.image_processor(encoding.processor), images)
        embed = running.program(encoding.encoder, encoding.embed)
        with running.weights(encoding.encoder) as weights:
            running.report("encoding", "image", 0, 1)
            embedded |= {name: to_host(array) for name, array in embed(weights, pixel_values=values).items()}
        check_finite(f"the {encoding.encoder.name}", embedded, running.dtype_name)
    latents = _encode_latents(running, list(_vae_parts(family, images, settings)))
    check_finite(
        "the VAE's encoder", {f"part {index}": latent for index, latent in enumerate(latents)}, running.dtype_name
    )
    return embedded | encoding.condition(latents, len(images), settings)


def encode_first_frame(running: RunningModel, image: Image.Image, settings: GenerationSettings) -> torch.Tensor:
    """The transformer's latents of a video of one frame, [1, channels, 1, height, width]."""
    first = next(video_parts([as_rgb(image)], settings, running.family.card.temporal_scale))
    (latents,) = _encode_latents(running, [first])
    check_finite("the VAE's encoder", {"first frame": latents}, running.dtype_name)
    return latents


def _encode_latents(running: RunningModel, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    vae, spec = running.vae, running.family.vae.component
    assert vae.encode_frames is not None
    latents: list[torch.Tensor] = []
    with running.weights(spec) as weights:
        cache = None
        for done, pixels in enumerate(parts, 1):
            columns = pixels.shape[-1] // running.family.card.spatial_scale
            axes = split_columns(vae.encode_axes, columns, running.placement)
            encode = running.program(spec, vae.encode_frames, input_axes=axes, donate=("cache",))
            latent, after = encode(weights, pixels=pixels, cache=cache)
            cache = None if _takes_references(running.family) else after
            latents.append(to_host(latent))
            running.report("encoding", "image", done, len(parts))
    return latents


def _vae_parts(
    family: ModelFamily, images: Sequence[Image.Image], settings: GenerationSettings
) -> Iterable[torch.Tensor]:
    """The parts that the VAE encodes one by one, [1, 3, frames, height, width] in -1..1."""
    if _takes_references(family):
        return [as_pixels(image) for image in images]
    parts = video_parts(images, settings, family.card.temporal_scale)
    assert family.image is not None
    return itertools.islice(parts, 1 if family.image.first_frame_only else None)


def _takes_references(family: ModelFamily) -> bool:
    return family.card.image is not None and family.card.image.role == "reference"


def encode_init_image(
    running: RunningModel, image: torch.Tensor, settings: GenerationSettings, strength: float
) -> InitImage:
    family = running.family
    if family.vae.encode_image is None:
        raise InvalidValueError(f"image cannot be used: {family.name} does not start from an image", field="image")
    columns = settings.width // family.card.spatial_scale
    axes = split_columns({"image": (None, None, MESH_AXES)}, columns, running.placement)
    program = running.program(family.vae.component, family.vae.encode_image, input_axes=axes)
    noise, _ = image_noise(latent_shape(family, running.files.latent_channels, settings), settings.seed)
    with running.weights(family.vae.component) as weights:
        latents = to_host(program(weights, image=image, noise=noise))
    check_finite("the VAE's encoder", {"latents": latents}, running.dtype_name)
    return InitImage(latents, strength)
