"""Checks of the inputs that a stage gets from the stage before it, and of settings against a family."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from comfy_tpu.config import AttentionConfig, GenerationSettings, TileWindow
from comfy_tpu.errors import InvalidValueError, NotFiniteError
from comfy_tpu.families.card import ModelCard
from comfy_tpu.families.context import begins_with_image, choose_method, needs_first_frame, window_settings
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.tiles import find_tiles
from comfy_tpu.finite import is_finite
from comfy_tpu.kernels import windows
from comfy_tpu.pipeline.embeddings import Embeddings, PromptEmbeddings
from comfy_tpu.pipeline.given_media import GivenMedia
from comfy_tpu.pipeline.initial import INITIAL, STRENGTH, check_strength, read_strength, without_initial
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.step import latent_shape
from comfy_tpu.terminal_text import excerpt

logger = logging.getLogger(__name__)

SOUND_GUIDANCE = (
    "stg_scale",
    "stg_block",
    "modality_scale",
    "guidance_rescale",
    "audio_guidance_scale",
    "audio_stg_scale",
    "audio_modality_scale",
    "audio_guidance_rescale",
)
"""Settings of models that make sound."""


def check_embeddings(
    files: ModelFiles, embeddings: PromptEmbeddings, guided: int, settings: GenerationSettings
) -> None:
    card = files.family.card
    with_image = begins_with_image(card, without_initial(embeddings.shared))
    _check_tiled_embeddings(files, embeddings.shared, settings)
    if choose_method(card, settings, begins_with_image=with_image) == "continue":
        _check_no_start(files, embeddings.shared, settings)
        if not card.makes_segments:
            settings = window_settings(settings)  # the image is that of a segment
    for branch in filter(None, (branch for pair in embeddings.each for branch in (pair.positive, pair.negative))):
        shared = check_initial(files, embeddings.shared, settings)
        every = {**branch, **shared}
        shapes = files.given_shapes(settings)
        _check_images(files, shared, shapes, settings)
        media = files.family.media
        optional = set(media.optional_embeddings) if media is not None else set()
        if missing := sorted(set(shapes) - set(every) - optional):
            how = ", with a video or without" if media and media.encodes_nothing else " and an image" if media else ""
            raise InvalidValueError(
                f"embeddings have no {', '.join(missing)}, which this model wants; encode with this model{how}"
            )
        found = {name: rows.shape[-1] for name, rows in every.items() if rows.ndim != 5}
        wanted = {name: shape[-1] for name, shape in shapes.items() if len(shape) != 4}
        if found != wanted:
            raise InvalidValueError(
                f"embeddings have {_format_widths(found)} features, this model wants {_format_widths(wanted)}; "
                "encode the prompt with this model"
            )
        if odd := [name for name, rows in every.items() if not is_finite(rows)]:
            raise InvalidValueError(f"embeddings hold NaN or infinity ({odd[0]}); encode the prompt again")
    for pair in embeddings.each:
        _check_branches(pair, settings)
    off = files.family.card.guidance_off
    if guided and embeddings.negative is None:
        raise InvalidValueError(
            f"guidance_scale is over {off:g} but the embeddings have no negative prompt; encode with guidance_scale "
            f"over {off:g}",
            field="guidance_scale",
        )


def _check_branches(embeddings: PromptEmbeddings, settings: GenerationSettings) -> None:
    """Raises InvalidValueError unless both prompts have the same shapes: they are rows of one batch. One row serves all
    videos; or each video has its own."""
    for name, rows in embeddings.positive.items():
        other = rows if embeddings.negative is None else embeddings.negative[name]
        if rows.ndim < 2 or rows.shape[0] not in (1, settings.num_videos) or rows.shape != other.shape:
            raise InvalidValueError(
                f"embeddings have {name} of shape {tuple(rows.shape)} for the prompt and {tuple(other.shape)} for the "
                "negative one, expected one row each, of the same size; encode both together"
            )


def _check_no_start(files: ModelFiles, shared: Embeddings, settings: GenerationSettings) -> None:
    """Raises InvalidValueError for latents to start from, of which segments would take a part each."""
    if not {INITIAL, STRENGTH} & set(shared):
        return
    if files.family.card.makes_segments:
        raise InvalidValueError(
            f"{files.name} makes videos segment by segment, and starts from no latents, image or video; leave them out"
        )
    raise InvalidValueError(
        f"a video of {settings.num_frames} frames is continued every {settings.context_frames}, and starts from no "
        f"latents; ask for {settings.context_frames} frames at most, or leave them out"
    )


def check_initial(files: ModelFiles, shared: Embeddings, settings: GenerationSettings) -> Embeddings:
    """The embeddings that `prepare` reads; raises InvalidValueError unless denoising can start from the others."""
    others = without_initial(shared)
    if len(others) == len(shared):
        return others
    if missing := {INITIAL, STRENGTH} - set(shared):
        raise InvalidValueError(f"embeddings to start from have no {min(missing)}; encode the image or video again")
    check_strength(files.family.card, read_strength(shared), settings)
    rows = settings.num_videos if len(shared[INITIAL]) == settings.num_videos else 1  # for all videos, or for each
    expected = (rows, *latent_shape(files.family, files.latent_channels, settings)[1:])
    if tuple(shared[INITIAL].shape) != expected:
        raise InvalidValueError(
            f"what to start from was made for other sizes: its latents have shape {tuple(shared[INITIAL].shape)}, "
            f"expected {expected}; encode or make it for {size_text(settings)}"
        )
    if not is_finite(shared[INITIAL]):
        raise InvalidValueError(
            "the latents to start from hold NaN or infinity; make them, or encode the image or video, again"
        )
    return others


def _check_images(
    files: ModelFiles, shared: Embeddings, shapes: Mapping[str, tuple[int, ...]], settings: GenerationSettings
) -> None:
    image = files.family.media
    known = {*shapes, *(image.optional_embeddings if image is not None else ())}
    if not set(shared) <= known:
        raise InvalidValueError(
            f"the image was encoded for another model: {files.name} does not read {', '.join(sorted(shared))}; "
            + ("leave it out" if image is None else "encode it with this model")
        )
    _, channels, _, height, width = latent_shape(files.family, files.latent_channels, settings)
    for name, rows in shared.items():
        # A model that may do without an image has its first frame's latents, whatever the length of the video.
        # A reference image has its own size.
        own = image is not None and image.fit_reference is not None
        expected = (channels, 1, *rows.shape[3:]) if own else shapes.get(name, (channels, 1, height, width))
        if image is not None and name == image.frames_from and rows.ndim == 5:
            most = expected[1] + files.family.card.max_references
            if expected[1] <= rows.shape[2] <= most:  # each reference image is a frame more
                expected = (expected[0], rows.shape[2], *expected[2:])
        if rows.ndim == 5 and tuple(rows.shape[1:]) != expected:
            raise InvalidValueError(
                f"the image was encoded for other sizes: {name} has shape {tuple(rows.shape[1:])}, expected "
                f"{expected}; encode it for {size_text(settings)}"
            )


def check_window(config: AttentionConfig, files: ModelFiles, settings: GenerationSettings | None = None) -> None:
    """Raises InvalidValueError where the attention window does not fit the model, or the video of these settings."""
    if config.window is None:
        return
    find_grid, card = files.family.denoiser.token_grid, files.family.card
    if find_grid is None:
        raise InvalidValueError(
            f"attention_window={config.window} is for transformers of video tokens, and {files.name} has none; choose "
            "full",
            field="attention_window",
        )
    if settings is not None and isinstance(config.window, TileWindow):
        windows.make_schedule(
            config.window, find_grid(files.config(files.family.transformer), card.latent_size(settings))
        )


def check_boundary(family: ModelFamily, model_name: str, settings: GenerationSettings) -> None:
    if settings.boundary > 0 and len(family.denoiser.transformers) == 1:
        raise InvalidValueError(
            f"boundary={settings.boundary} is for models with two transformers, and {model_name} has one; leave it out",
            field="boundary",
        )


def check_context(card: ModelCard, model_name: str, settings: GenerationSettings) -> None:
    """Raises InvalidValueError for windows and tiles that the model has no use for."""
    if card.sound is not None and settings.context not in ("auto", "none"):
        raise InvalidValueError(
            f"context={settings.context} is for silent videos, and {model_name} makes sound with them; choose none",
            field="context",
        )
    _check_tiles(card, model_name, settings)


def _check_tiles(card: ModelCard, model_name: str, settings: GenerationSettings) -> None:
    if find_tiles(card, settings) is None:
        return
    method = choose_method(card, settings, begins_with_image=needs_first_frame(card))
    if card.sound is not None or method == "continue":
        what = "makes sound with them" if card.sound is not None else "continues them from their own last frames"
        raise InvalidValueError(
            f"tile={settings.tile} is for videos that are made at once, and {model_name} {what}; leave it out",
            field="tile",
        )


def check_tiled_media(card: ModelCard, model_name: str, settings: GenerationSettings, given: GivenMedia) -> None:
    """Raises InvalidValueError for media that the model looks at as a whole, beside tiles of the result."""
    if find_tiles(card, settings) is None:
        return
    whole = {
        "reference": bool(given.references),
        "image": bool(given.images) and not card.starts_from_image and not card.cuts_media,
        "video": bool(given.videos) and not card.starts_from_video and not card.cuts_media,
    }
    for name, is_given in whole.items():
        if is_given:
            raise InvalidValueError(_tiles_beside(settings, model_name, name), field="tile")


def _check_tiled_embeddings(files: ModelFiles, shared: Embeddings, settings: GenerationSettings) -> None:
    """The same of encoded media."""
    if find_tiles(files.family.card, settings) is None:
        return
    cut, frames = files.family.denoiser.frame_inputs, files.family.card.latent_frames(settings)
    for name, rows in without_initial(shared).items():
        if name in cut and rows.shape[2] != frames:
            raise InvalidValueError(_tiles_beside(settings, files.name, "reference"), field="tile")
        if name not in cut and (rows.ndim == 5 or not cut):
            raise InvalidValueError(_tiles_beside(settings, files.name, "image"), field="tile")


def _tiles_beside(settings: GenerationSettings, model: str, name: str) -> str:
    return (
        f"tile={settings.tile} shows a part of the result, and {model} looks at all of {name} with it; leave one of "
        "them out"
    )


def check_latents(latents: torch.Tensor, expected: tuple[int, ...], settings: GenerationSettings) -> None:
    if tuple(latents.shape) != expected:
        raise InvalidValueError(
            f"latents have shape {tuple(latents.shape)}, expected {expected} for {size_text(settings)}; "
            "decode with the settings and the model they were made with"
        )
    if not is_finite(latents):
        raise InvalidValueError("latents hold NaN or infinity; denoise again, with other settings or in float32")


def check_finite(stage: str, made: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Raises NotFiniteError if a stage computed NaN or infinity, which later stages could turn into a plausible
    image."""
    if odd := [name for name, tensor in made.items() if not is_finite(tensor)]:
        advice = "try dtype=float32, or " if dtype != "float32" else ""
        raise NotFiniteError(
            f"{stage} gave NaN or infinity ({odd[0]}, computed in {dtype}); {advice}check the model's weights and the "
            "settings"
        )


def warn_of_ignored(family: ModelFamily, defaults: GenerationSettings, settings: GenerationSettings) -> None:
    """Warns of settings that the user chose and that this family does not use."""
    of_branches = ("negative_prompt", "guidance_until", "cfg_normalization")
    ignored = {"classifier_free": (), "embedded": of_branches, "none": ("guidance_scale", *of_branches)}
    reasons = {
        "guidance_scale": "was distilled to do without guidance",
        "guidance_scale_2": "has one transformer",
        **dict.fromkeys(SOUND_GUIDANCE, "makes no sound"),
        **dict.fromkeys(of_branches, "has no branch for a negative prompt"),
        **({"cfg_normalization": "has no limit on its guidance"} if family.card.guidance == "classifier_free" else {}),
    }
    of_pairs = ("guidance_scale_2",) if len(family.denoiser.transformers) == 1 else ()
    of_norms = () if family.card.normalizes_guidance else ("cfg_normalization",)
    of_sound = () if family.card.sound is not None else SOUND_GUIDANCE
    for name in dict.fromkeys((*ignored[family.card.guidance], *of_pairs, *of_norms, *of_sound)):
        if getattr(settings, name) != getattr(defaults, name):
            value = excerpt(str(getattr(settings, name)))
            logger.warning("%s=%s has no effect: %s %s", name, value, family.name, reasons[name], extra={"field": name})


def warn_of_cut(field: str, cut: str) -> None:
    """Warns that the end of a text was cut."""
    logger.warning("%s is too long; this was cut: %s", field, excerpt(cut), extra={"field": field})


def size_text(settings: GenerationSettings) -> str:
    return f"{settings.width}×{settings.height}×{settings.num_frames}"


def _format_widths(found: Mapping[str, int]) -> str:
    """ "4096"; of several embeddings "text 4096, pooled 768"."""
    named = [f"{name} {width}" for name, width in found.items()]
    return str(*found.values()) if len(found) == 1 else ", ".join(named)
