"""All families, built in and installed, and which of them a model directory belongs to."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from comfy_tpu.config import VAE_BACKEND
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.card import Config, FamilyCard, ModelCard
from comfy_tpu.families.card_checks import CardError, check_card

if TYPE_CHECKING:
    from comfy_tpu.families.model_family import ModelFamily

logger = logging.getLogger(__name__)

BUILT_IN = (
    "comfy_tpu.families.wan",
    "comfy_tpu.families.flux",
    "comfy_tpu.families.flux2",
    "comfy_tpu.families.hunyuan_video",
    "comfy_tpu.families.ltx_video",
    "comfy_tpu.families.ltx2",
    "comfy_tpu.families.z_image",
    "comfy_tpu.families.qwen_image",
)
"""Packages, each with a `card.py` and a `model.py`."""

ENTRY_POINT_GROUP = "comfy_tpu.families"
"""An installed distribution adds a family by an entry point of this group, whose value is the family's package."""

_REGISTERED: list[str] = []
"""Packages that `register_family` added."""


@functools.cache
def family_cards() -> tuple[FamilyCard, ...]:
    """The built-in families, then the installed ones. An installed one that fails is named in the log and left out."""
    cards: list[FamilyCard] = []
    for package in BUILT_IN:
        cards.append(_read_card(package, cards))
    for name, package in (*_installed(), *((package, package) for package in _REGISTERED)):
        if any(package == card.package for card in cards):
            continue
        try:
            cards.append(_read_card(package, cards))
        except Exception as error:  # noqa: BLE001 - code of others, which must not take ours along
            logger.warning("family %s (package %s) is left out: %s", name, package, _reason(error))
    return tuple(cards)


def register_family(package: str) -> FamilyCard:
    """Adds the family of an importable package, as its entry point would, and returns its card.

    For a pack that ComfyUI loads from a directory pip does not know. Raises CardError for a card that cannot be used.
    """
    known = next((card for card in family_cards() if card.package == package), None)
    if known is not None:
        return known
    card = _read_card(package, family_cards())
    _REGISTERED.append(package)
    family_cards.cache_clear()
    return card


def model_cards() -> tuple[ModelCard, ...]:
    return tuple(model for card in family_cards() for model in card.models)


def find_model_card(index: Config, transformer: Config, scheduler: Config) -> ModelCard:
    """By the model's model_index.json and the configurations of transformer and scheduler, empty where it has none."""
    found = [card for card in model_cards() if card.accepts(index, transformer, scheduler)]
    if len(found) > 1:
        owners = " and ".join(f"{card.name} ({find_family_card(card).package})" for card in found)
        raise UnsupportedError(f"the model is claimed by {owners}; uninstall one of them")
    if found:
        return found[0]
    known = ", ".join(f"{card.name} ({' or '.join(card.pipeline_classes)})" for card in model_cards())
    raise UnsupportedError(f"the model is a {index.get('_class_name')}; supported are {known}")


@functools.cache
def load_family(name: str) -> ModelFamily:
    """The code of the model card of this name. Imports torch and jax."""
    card = next(card for card in model_cards() if card.name == name)
    owner = find_family_card(card)
    models = _import_models(owner)
    if name not in models:
        raise CardError(f"{owner.package}.model has no {name} in MODELS; its card.py names that model")
    check_code(card, models[name], owner.package)
    return models[name]


def check_code(card: ModelCard, family: ModelFamily, package: str) -> None:
    """Raises CardError where the code of a model is not what its card says."""
    if tuple(family.scheduling.factories) != card.limits.schedulers:
        raise CardError(
            f"{package}.model has the schedulers {', '.join(family.scheduling.factories)} for {card.name}, its card "
            f"{', '.join(card.limits.schedulers)}; make them the same"
        )
    if card.encodes_results and family.vae.encode_frames is None and family.vae.encode_image is None:
        raise CardError(
            f"the card of {card.name} says encodes_results, and {package}.model has no function of the VAE for it; "
            "make them the same"
        )
    if unknown := set(card.vae_backends) - {VAE_BACKEND, *family.vae.other_backends}:
        raise CardError(f"{package}.model has no VAE backend {min(unknown)} for {card.name}; its card.py names it")
    encodes = bool(card.videos or card.max_references) or (card.image is not None and not card.starts_from_image)
    for fact, said, found in (
        ("transformer_count", card.transformer_count, len(family.denoiser.transformers)),
        ("an image to start from", card.starts_from_image, family.vae.encode_image is not None),
        ("an image or a video as input", encodes, family.media is not None),
        ("cuts_media", card.cuts_media, bool(family.denoiser.frame_inputs)),
        ("a sound", card.sound is not None, family.sound is not None),
        ("reads_single_files", card.reads_single_files, bool(family.single_files)),
        (
            "seen_by_text_encoder",
            card.image is not None and card.image.seen_by_text_encoder,
            any(encoder.read_images is not None for encoder in family.text.encoders),
        ),
    ):
        if said != found:
            raise CardError(f"the card of {card.name} says {fact}: {said}, {package}.model {found}; make them the same")


def find_published(model: str) -> tuple[str, ModelCard] | None:
    """The hub id and the card of a model whose configuration is built in, by the id or the last part of it."""
    known = {hub_id: card for card in model_cards() for hub_id in card.published}
    for hub_id, card in known.items():
        if model.lower() in (hub_id.lower(), hub_id.rpartition("/")[2].lower()):
            return hub_id, card
    return None


def load_families() -> tuple[ModelFamily, ...]:
    """The code of all models. An installed family whose code fails is named in the log and left out."""
    found = []
    for card in model_cards():
        try:
            found.append(load_family(card.name))
        except CardError as error:
            if find_family_card(card).package in BUILT_IN:
                raise
            _warn_of_code(str(error))
    return tuple(found)


@functools.cache  # once for a family
def _warn_of_code(reason: str) -> None:
    logger.warning("%s", reason)


def _import_models(owner: FamilyCard) -> dict[str, ModelFamily]:
    try:
        models: dict[str, ModelFamily] = importlib.import_module(f"{owner.package}.model").MODELS
    except Exception as error:
        if owner.package in BUILT_IN:
            raise
        raise CardError(
            f"family {owner.name} (package {owner.package}) is left out: its model.py cannot be used "
            f"({_reason(error)}); update that package, or uninstall it"
        ) from error
    return models


def find_family_card(model: ModelCard) -> FamilyCard:
    return next(card for card in family_cards() if model in card.models)


def _installed() -> Iterator[tuple[str, str]]:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for point in sorted(points, key=lambda point: point.name):
        yield point.name, point.value


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _read_card(package: str, others: Iterable[FamilyCard]) -> FamilyCard:
    card = importlib.import_module(f"{package}.card").CARD
    if not isinstance(card, FamilyCard):
        raise CardError(f"CARD of {package}.card is a {type(card).__name__}, expected a FamilyCard")
    if card.package != package:
        raise CardError(f"the card of {package} says package={card.package!r}; write package=__package__ there")
    check_card(card, others)
    return card
