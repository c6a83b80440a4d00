"""Parts of help texts that come from the family cards."""

from __future__ import annotations

from collections.abc import Callable

from comfy_tpu.families.card import FamilyCard, ModelCard
from comfy_tpu.families.registry import family_cards, model_cards


def default_model() -> ModelCard:
    """The model whose defaults help texts show."""
    return model_cards()[0]


def frame_counts() -> str:
    """Allowed numbers of frames: "4n+1 for Wan, HunyuanVideo-1.5; 8n+1 for LTX-Video"."""

    def multiples(card: FamilyCard) -> str:
        found = {model.limits.frames_multiple for model in card.models if not model.makes_images}
        return " or ".join(f"{multiple}n+1" if multiple > 1 else "any" for multiple in sorted(found, reverse=True))

    return _by_family(multiples)


def size_names() -> str:
    """Names of sizes: "480P, 720P for Wan; 512, 768, 1024 for Flux.1"."""

    def sizes(card: FamilyCard) -> str:
        return ", ".join(sorted({name for model in card.models for name in model.sizes}, key=_size_key))

    return _by_family(sizes)


def preset_names() -> str:
    """Names of presets: "4step, 8step for Wan; turbo for Flux.1"."""

    def presets(card: FamilyCard) -> str:
        return ", ".join(sorted({name for model in card.models for name in model.presets}, key=_size_key))

    return _by_family(presets)


def families_with(fact: Callable[[ModelCard], bool]) -> str:
    """The titles of the families that have such a model: "Flux.1, Flux.2"."""
    return ", ".join(_escape(card.title) for card in family_cards() if any(map(fact, card.models)))


def models_with(fact: Callable[[ModelCard], bool]) -> str:
    """The names of the models with a property: "Wan 2.1, Wan 2.2"."""
    return _escape(", ".join(model.name for model in model_cards() if fact(model)))


def video_words(name: str) -> str:
    """What a given video of this name is: "the video to be changed, for Wan 2.1; …"."""
    groups: dict[str, list[str]] = {}
    for model in model_cards():
        if (video := model.find_video(name)) is not None:
            groups.setdefault(video.words, []).append(model.name)
    return _escape("; ".join(f"{words}, for {', '.join(names)}" for words, names in groups.items()))


def segment_models() -> str:
    return models_with(lambda model: model.makes_segments)


def references() -> str:
    """What --reference is for, with the models that take one."""
    takes = models_with(lambda model: bool(model.max_references) or model.takes_references)
    return f"a picture of a person, thing or style to be shown, for {takes}; may be repeated"


def normalizing_models() -> str:
    """The models that read cfg_normalization."""
    return models_with(lambda model: model.normalizes_guidance)


def sounding_models() -> str:
    """The models that make sound."""
    return models_with(lambda model: model.sound is not None)


def _by_family(describe: Callable[[FamilyCard], str]) -> str:
    groups: dict[str, list[str]] = {}
    for card in family_cards():
        if text := describe(card):
            groups.setdefault(text, []).append(card.title)
    return _escape("; ".join(f"{text} for {', '.join(titles)}" for text, titles in groups.items()))


def _size_key(name: str) -> tuple[int, str]:
    """A sort key by the number in a size's name: 512, 768, 1024."""
    digits = "".join(filter(str.isdigit, name))
    return int(digits or 0), name


def _escape(text: str) -> str:
    """Doubles %, which argparse would replace."""
    return text.replace("%", "%%")
