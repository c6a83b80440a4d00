"""Checks of cards: facts that are missing, contradict each other, or belong to another family already."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.families.card import VIDEO_NAMES, FamilyCard, Guidance, ImageRole, ModelCard, NodeSet, Preset, VideoRole
from comfy_tpu.families.settings import check_settings

RESERVED_PRESETS = ("auto", "none")
"""Words that a user may say in place of a preset's name."""


class CardError(ComfyTpuError):
    """A card lacks a fact, or two facts contradict each other."""


def check_card(card: FamilyCard, others: Iterable[FamilyCard] = ()) -> None:
    """Raises CardError for the first problem. `others`: the families that were registered before."""
    for problem in _problems(card):
        raise CardError(f"the card of {card.package} {problem}; correct its card.py")
    for other in others:
        for kind, own, theirs in (
            ("package", {card.package}, {other.package}),
            ("model", {model.name for model in card.models}, {model.name for model in other.models}),
            ("hub id", _hub_ids(card), _hub_ids(other)),
            ("node key", {nodes.key for nodes in card.node_sets}, {nodes.key for nodes in other.node_sets}),
        ):
            if both := sorted(own & theirs):
                raise CardError(f"{card.package} claims the {kind} {both[0]}, which {other.package} has already")


def _problems(card: FamilyCard) -> Iterator[str]:
    if not card.package or not card.title or not card.node_sets:
        yield "lacks its package, title or node_sets"
    for kind, names in (
        ("model", [model.name for model in card.models]),
        ("hub id", [hub_id.lower() for model in card.models for hub_id in model.published]),
        ("node key", [nodes.key for nodes in card.node_sets]),
    ):
        if twice := [name for name in names if names.count(name) > 1]:
            yield f"names the {kind} {twice[0]} twice"
    for nodes in card.node_sets:
        yield from (f"{problem} in node set {nodes.key}" for problem in _node_problems(nodes))
    for model in card.models:
        yield from (f"says of {model.name} that {problem}" for problem in _model_problems(model))


def _node_problems(nodes: NodeSet) -> Iterator[str]:
    if not nodes.models:
        yield "has no models"
        return
    if not nodes.key.isidentifier():
        yield f"has the key {nodes.key!r}, of which no node id can be made,"
    for fact in ("name", "category"):  # without a latent_format there are no previews
        if not getattr(nodes, fact):
            yield f"lacks the {fact}"
    for fact, default, most in (
        ("size_max", max(nodes.defaults.height, nodes.defaults.width), nodes.size_max),
        ("frames_max", nodes.defaults.num_frames, nodes.frames_max),
        ("shift_max", nodes.defaults.flow_shift or 0, nodes.shift_max),
    ):
        if default > most:
            yield f"has {fact}={most}, and the default is {default},"
    if not nodes.hub_models:
        yield "names no published model"
    if len({image.role for image in nodes.image_inputs}) > 1:
        yield "gives images several roles"
    if len({model.makes_images for model in nodes.models}) > 1:
        yield "mixes image and video models"
    if not nodes.makes_images and not (nodes.words.frames and nodes.words.flow_shift and nodes.words.trained_fps):
        yield "has no words for frames, flow_shift or trained_fps"


def _model_problems(model: ModelCard) -> Iterator[str]:
    limits, image = model.limits, model.image
    published: object = model.published
    if not model.pipeline_classes:
        yield "it has no pipeline_classes"
    for fact, value, known in (
        ("guidance", model.guidance, get_args(Guidance)),
        ("image role", image.role if image is not None else None, (None, *get_args(ImageRole))),
    ):
        if value not in known:
            yield f"its {fact} is {value!r}, expected {' or '.join(map(str, filter(None, known)))}"
    if not isinstance(published, Mapping):
        yield "its published models are no configurations by hub id"
    if not model.vae_backends:
        yield "it has no vae_backends"
    if model.spatial_scale < 1 or model.temporal_scale < 1:
        yield f"a latent has {model.spatial_scale} pixels and {model.temporal_scale} frames, expected 1 or more"
        return
    if limits.size_multiple % model.spatial_scale:
        yield f"sizes are multiples of {limits.size_multiple}, and a latent has {model.spatial_scale} pixels"
    if not model.makes_images and not model.makes_segments and limits.frames_multiple % model.temporal_scale:
        yield f"frames are {limits.frames_multiple}n+1, and a latent has {model.temporal_scale}"
    if model.transformer_count not in (1, 2):
        yield f"it has {model.transformer_count} transformers, expected 1 or 2"
    if model.transformer_count == 2 and not model.defaults.boundary:
        yield "it has two transformers, and its defaults no boundary between them"
    if image is not None and image.role != "reference" and image.max_images > 1:
        yield f"it takes {image.max_images} images, which only a model with reference images does"
    if image is not None and image.role != "first_frame" and image.last_image != "no":
        yield "it takes a last image and no first frame"
    yield from _video_problems(model)
    for name, size in {"default": {}, **model.sizes}.items():
        yield from _settings_problems(f"size {name}", size, model)
    for hub_id, own in model.own_defaults.items():
        if hub_id not in model.published:
            yield f"its own_defaults have {hub_id}, which is not published"
        yield from _settings_problems(f"own_defaults of {hub_id}", own, model)
    presets: Mapping[str, object] = model.presets
    for name, preset in presets.items():
        if not isinstance(preset, Preset):
            yield f"its preset {name} is a {type(preset).__name__}, expected a Preset; names of sizes belong to sizes"
            continue
        if name in RESERVED_PRESETS or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
            yield f"its preset {name!r} is not named by small letters, digits and dashes, or by a reserved word"
        yield from _settings_problems(f"preset {name}", preset.settings, model)
        yield from (f"its preset {name} has the pattern {each!r}, which is none" for each in _bad_patterns(preset))


def _settings_problems(what: str, settings: Mapping[str, object], model: ModelCard) -> Iterator[str]:
    if unknown := sorted(set(settings) - {field.name for field in dataclasses.fields(GenerationSettings)}):
        yield f"its {what} has {unknown[0]}, which is no setting"
        return
    try:
        check_settings(dataclasses.replace(model.defaults, **settings), model.limits)  # type: ignore[arg-type]
    except InvalidValueError as error:
        yield f"its {what} cannot be used: {error}"


def _bad_patterns(preset: Preset) -> Iterator[str]:
    for pattern in preset.patterns:
        try:
            re.compile(pattern)
        except re.error:
            yield pattern


def _video_problems(model: ModelCard) -> Iterator[str]:
    names = [video.name for video in model.videos]
    for video in model.videos:
        if video.name not in VIDEO_NAMES:
            yield f"its video {video.name!r} is none of {', '.join(VIDEO_NAMES)}"
        if video.role not in get_args(VideoRole):
            yield f"the role of its {video.name} is {video.role!r}, expected {' or '.join(get_args(VideoRole))}"
        if names.count(video.name) > 1:
            yield f"it takes {video.name} twice"
        if missing := sorted(set(video.needs) - set(names)):
            yield f"its {video.name} needs {missing[0]}, which it does not take"
    if model.starts_from_video and (model.starts_from_image or len(names) > 1):
        yield "denoising starts from a video, and it takes more than that"
    if model.videos and model.makes_images:
        yield "it takes videos and makes images"


def _hub_ids(card: FamilyCard) -> set[str]:
    return {hub_id.lower() for model in card.models for hub_id in model.published}
