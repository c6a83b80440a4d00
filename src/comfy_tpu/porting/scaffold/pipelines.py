"""What there is to port: a pipeline of diffusers by its name, or a model directory; what it is made of."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.errors import GUIDE, InvalidValueError, UnsupportedError
from comfy_tpu.families.registry import family_cards, model_cards
from comfy_tpu.porting.small_models import known_small_models
from comfy_tpu.porting.targets import read_object
from comfy_tpu.quiet import quiet

ENCODERS = {"T5EncoderModel": "t5", "UMT5EncoderModel": "umt5", "CLIPTextModel": "clip"}
"""Text encoders that a family has components for, with the names of those."""

TEXT_WIDTH = 4096
"""The width of T5-XXL, with which models are published that leave the width open."""
_HUB_ID = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
_TEXT_WIDTHS = ("caption_channels", "text_embed_dim", "joint_attention_dim", "cross_attention_input_dim")


@dataclasses.dataclass(frozen=True)
class Source:
    """A pipeline to port."""

    pipeline: type
    parts: Mapping[str, type]
    """Classes of models, tokenizers and the scheduler, by the name of the folder."""
    configs: Mapping[str, Mapping[str, Any]]
    """Configurations of the parts in a model directory; empty for a class."""
    directory: Path | None = None
    """Where one was given."""
    hub_id: str | None = None
    """The model of the hub that the directory says it is."""

    @property
    def name(self) -> str:
        return self.pipeline.__name__

    @property
    def title(self) -> str:
        """The name that the nodes show."""
        return self.name.removesuffix("Pipeline")

    @property
    def class_names(self) -> dict[str, str]:
        return {name: cls.__name__ for name, cls in self.parts.items()}

    @property
    def code(self) -> str:
        """The source of the pipeline's module, with its example; empty where it cannot be read."""
        try:
            return Path(inspect.getfile(self.pipeline)).read_text(encoding="utf-8")
        except OSError:
            return ""

    @property
    def encoders(self) -> tuple[str, ...]:
        return tuple(name for name in self.parts if name.startswith("text_encoder"))

    def tokenizer(self, encoder: str) -> str:
        return encoder.replace("text_encoder", "tokenizer")

    def full_config(self, part: str) -> dict[str, Any]:
        """The configuration at the published size: the directory's, and the class's defaults."""
        parameters = inspect.signature(self.parts[part]).parameters
        defaults = {
            name: each.default
            for name, each in parameters.items()
            if each.default is not each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        }
        known = known_small_models().get(self.parts[part].__name__, {})
        for key, value in known.get("config", {}).items():
            # What every published model has, and the class does without.
            if isinstance(value, bool):
                defaults[key] = value
            elif key in defaults and defaults[key] is None and key in _TEXT_WIDTHS:
                defaults[key] = TEXT_WIDTH
        return {**defaults, **{key: value for key, value in self.configs.get(part, {}).items() if key in parameters}}

    @property
    def hub_model(self) -> str | None:
        """The id of the directory's model; for a class, of the model that the pipeline's own example uses."""
        if self.directory is not None:
            return self.hub_id
        found = re.search(rf"""from_pretrained\([^)]*?["']({_HUB_ID})["']""", self.code)
        return found[1] if found else None


def is_hub_id(text: str) -> bool:
    """owner/name. What begins with a dot is a path."""
    return re.fullmatch(_HUB_ID, text) is not None


def find_source(model: str) -> Source:
    path = Path(model)
    if path.is_dir():
        return _read_directory(path)
    if "/" in model or not model.isidentifier():
        raise InvalidValueError(
            f"model={model} is neither a model directory nor the name of a pipeline; give a directory with "
            "model_index.json, or the name of a pipeline class of diffusers",
            field="model",
        )
    return _read_class(model)


PROMPT_ALONE = (
    "and `port new` knows only pipelines that make an image or a video from a prompt alone: write the family by hand, "
    f"{GUIDE} says how"
)


def image_arguments(source: Source) -> list[str]:
    """Arguments of a call that are images or videos; None by default does not say that it does without."""
    given = inspect.signature(source.pipeline.__call__).parameters
    return [name for name in given if re.fullmatch(r"(\w+_)?(image|video|mask)s?|controls", name)]


def check_supported(source: Source) -> None:
    """Raises where a part that a family needs is absent or unknown, or a family has the pipeline already."""
    for family in model_cards():
        if source.name in family.pipeline_classes:
            raise InvalidValueError(
                f"model={source.name} is supported already, as {family.name}; there is nothing to port", field="model"
            )
    required = [
        name
        for name, each in inspect.signature(source.pipeline.__call__).parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and name not in ("self", "prompt")
    ]
    if required:
        raise UnsupportedError(f"{source.name} cannot be called without {', '.join(required)}, {PROMPT_ALONE}")
    for part in ("transformer", "vae", "scheduler"):
        if part not in source.parts:
            raise UnsupportedError(
                f"{source.name} has no {part} (it has {', '.join(source.parts)}); a family wants a transformer, a VAE, "
                f"a scheduler and text encoders: write it by hand, {GUIDE} says how"
            )
    if not source.encoders:
        raise UnsupportedError(f"{source.name} has no text encoder; a family reads a prompt: write it by hand")
    for encoder in source.encoders:
        name = source.parts[encoder].__name__
        if name not in ENCODERS:
            raise UnsupportedError(
                f"the {encoder} of {source.name} is a {name}, for which there is no component; known are "
                f"{', '.join(ENCODERS)}: add one to families/shared/text_encoders.py first"
            )


def check_unclaimed(source: Source, model_id: str) -> None:
    """Raises InvalidValueError where another family has the title, which node ids begin with, or the hub id."""
    for card in family_cards():
        keys = {nodes.key for nodes in card.node_sets} | {model.name for model in card.models}
        hub_ids = {hub_id.lower() for model in card.models for hub_id in model.published}
        if source.title in keys:
            raise InvalidValueError(
                f"model={source.name} would make nodes called {source.title}, which {card.package} has already; "
                "uninstall that family, or port another pipeline",
                field="model",
            )
        if model_id.lower() in hub_ids:
            raise InvalidValueError(
                f"model_id={model_id} belongs to {card.package} already; give the id of another model",
                field="model_id",
            )


def _read_class(name: str) -> Source:
    with quiet():
        import diffusers

        pipeline = getattr(diffusers, name, None)
    if not isinstance(pipeline, type) or not issubclass(pipeline, diffusers.DiffusionPipeline):
        raise InvalidValueError(
            f"model={name} is no pipeline of diffusers {diffusers.__version__}; give the name of one, "
            "or a model directory",
            field="model",
        )
    return Source(pipeline, _annotated_parts(pipeline), {})


def _annotated_parts(pipeline: type) -> dict[str, type]:
    """The classes of the parts by annotations; of several for one part, the first."""
    with quiet():
        from diffusers import DPMSolverMultistepScheduler

        hints = typing.get_type_hints(pipeline.__init__)  # type: ignore[misc]
    optional = set(getattr(pipeline, "_optional_components", ()))
    found: dict[str, type] = {}
    for name in inspect.signature(pipeline).parameters:
        hint = hints.get(name)
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next((each for each in typing.get_args(hint) if each is not type(None)), None)
        is_part = isinstance(hint, type) and hint.__module__.split(".")[0] in ("diffusers", "transformers")
        # Optional to diffusers, since embeddings may be given, or the second of two transformers alone.
        is_read = name.startswith(("text_encoder", "tokenizer")) or name == "transformer"
        if name == "scheduler" and not hasattr(hint, "step"):
            hint = DPMSolverMultistepScheduler  # of many that it may be, what most models are published with
        if is_part and (is_read or name not in optional):
            found[name] = typing.cast(type, hint)
    return found


def _read_directory(path: Path) -> Source:
    index = read_object(path / "model_index.json")
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise InvalidValueError(f"{path / 'model_index.json'} does not say _class_name; give a model of diffusers")
    source = _read_class(name)
    folders = _indexed_classes(path / "model_index.json", index, source.parts)
    configs: dict[str, Mapping[str, Any]] = {}
    for part in folders:
        for file in ("config.json", "scheduler_config.json"):
            if (path / part / file).is_file():
                content = read_object(path / part / file)
                configs[part] = {key: value for key, value in content.items() if not key.startswith("_")}
    parts = dict(source.parts)
    with quiet():
        for part, (library, cls) in folders.items():
            if library in ("diffusers", "transformers"):
                parts[part] = getattr(importlib.import_module(library), cls, parts[part])
    name = str(index.get("_name_or_path", ""))
    return dataclasses.replace(
        source, parts=parts, configs=configs, directory=path, hub_id=name if is_hub_id(name) else None
    )


def _indexed_classes(path: Path, index: Mapping[str, Any], parts: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Part -> library and class. A pair of nulls is a part that this model does without."""
    found = {}
    for part in parts:
        origin = index.get(part)
        if origin is None or origin == [None, None]:
            continue
        if not isinstance(origin, list) or len(origin) != 2 or not all(isinstance(each, str) for each in origin):
            raise InvalidValueError(
                f'{path} says "{part}": {json.dumps(origin)}, expected a library and a class such as ["diffusers", '
                '"AutoencoderKL"]; download it again'
            )
        found[part] = (origin[0], origin[1])
    return found
