"""What there is to port: a pipeline of diffusers by its name, or a model directory; what it is made of."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.families.registry import FAMILIES
from comfy_tpu.porting.small_models import SMALL_MODELS
from comfy_tpu.quiet import quiet

ENCODERS = ("T5EncoderModel", "UMT5EncoderModel", "CLIPTextModel")
"""Text encoders that a family has components for."""

TEXT_WIDTH = 4096
"""Of T5-XXL, which is what models are published with that leave the width open."""
_TEXT_WIDTHS = ("caption_channels", "text_embed_dim", "joint_attention_dim", "cross_attention_input_dim")


@dataclasses.dataclass(frozen=True)
class Source:
    """A pipeline to port."""

    pipeline: type
    parts: Mapping[str, type]
    """By the name of the folder: models, tokenizers and the scheduler."""
    configs: Mapping[str, Mapping[str, Any]]
    """What a model directory says of them; empty for a class."""
    directory: Path | None = None
    """Where one was given."""
    named: str | None = None
    """The model of the hub that the directory says it is."""

    @property
    def name(self) -> str:
        return self.pipeline.__name__

    @property
    def encoders(self) -> tuple[str, ...]:
        return tuple(name for name in self.parts if name.startswith("text_encoder"))

    def tokenizer(self, encoder: str) -> str:
        return encoder.replace("text_encoder", "tokenizer")

    def full_config(self, part: str) -> dict[str, Any]:
        """At its published size: the directory's, with the class's defaults where that says nothing."""
        parameters = inspect.signature(self.parts[part]).parameters
        defaults = {
            name: each.default
            for name, each in parameters.items()
            if each.default is not each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        }
        known = SMALL_MODELS.get(self.parts[part].__name__)
        for key, value in known.config.items() if known is not None else ():
            # What every published model has, and the class does without.
            if isinstance(value, bool):
                defaults[key] = value
            elif key in defaults and defaults[key] is None and key in _TEXT_WIDTHS:
                defaults[key] = TEXT_WIDTH
        return {**defaults, **{key: value for key, value in self.configs.get(part, {}).items() if key in parameters}}

    @property
    def hub_model(self) -> str | None:
        """What the directory says; of a class, the model that the pipeline's own example uses."""
        if self.directory is not None:
            return self.named
        try:
            text = Path(inspect.getfile(self.pipeline)).read_text(encoding="utf-8")
        except OSError:
            return None
        found = re.search(r"""from_pretrained\([^)]*?["']([\w.-]+/[\w.-]+)["']""", text)
        return found[1] if found else None


def find_source(model: str) -> Source:
    path = Path(model)
    if path.is_dir():
        return _of_directory(path)
    if "/" in model or not model.isidentifier():
        raise InvalidValueError(
            f"--from={model} is neither a model directory nor the name of a pipeline; give a directory with "
            "model_index.json, or a class of diffusers such as PixArtSigmaPipeline"
        )
    return _of_class(model)


def check_supported(source: Source) -> None:
    """What a family is made of must be there, and no family for it yet."""
    for family in FAMILIES:
        if source.name in family.pipeline_classes:
            raise InvalidValueError(f"{source.name} is supported already, as {family.name}; there is nothing to port")
    for part in ("transformer", "vae", "scheduler"):
        if part not in source.parts:
            raise UnsupportedError(
                f"{source.name} has no {part} (it has {', '.join(source.parts)}); a family wants a transformer, a VAE, "
                "a scheduler and text encoders: write it by hand, docs/porting.md says how"
            )
    if not source.encoders:
        raise UnsupportedError(f"{source.name} has no text encoder; a family reads a prompt: write it by hand")
    for encoder in source.encoders:
        name = source.parts[encoder].__name__
        if name not in ENCODERS:
            raise UnsupportedError(
                f"the {encoder} of {source.name} is a {name}, for which there is no component; known are "
                f"{', '.join(ENCODERS)}: add one to families/text_encoders.py first"
            )


def _of_class(name: str) -> Source:
    with quiet():
        import diffusers

        pipeline = getattr(diffusers, name, None)
    if not isinstance(pipeline, type) or not issubclass(pipeline, diffusers.DiffusionPipeline):
        raise InvalidValueError(
            f"diffusers {diffusers.__version__} has no pipeline {name}; give one such as PixArtSigmaPipeline, or a "
            "model directory"
        )
    return Source(pipeline, _annotated(pipeline), {})


def _annotated(pipeline: type) -> dict[str, type]:
    """Of several classes that a part may have, the first is the one that diffusers tells of first."""
    with quiet():
        hints = typing.get_type_hints(pipeline.__init__)  # type: ignore[misc]
    optional = set(getattr(pipeline, "_optional_components", ()))
    found: dict[str, type] = {}
    for name in inspect.signature(pipeline).parameters:
        hint = hints.get(name)
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next((each for each in typing.get_args(hint) if each is not type(None)), None)
        is_part = isinstance(hint, type) and hint.__module__.split(".")[0] in ("diffusers", "transformers")
        read = name.startswith(("text_encoder", "tokenizer"))  # optional to diffusers, since embeddings may be given
        if name == "scheduler" and not hasattr(hint, "step"):
            hint = _any_scheduler()
        if is_part and (read or name not in optional):
            found[name] = typing.cast(type, hint)
    return found


def _any_scheduler() -> type:
    """For pipelines that take many and name none: the solver that most of their models are published with."""
    from diffusers import DPMSolverMultistepScheduler

    return DPMSolverMultistepScheduler


def _of_directory(path: Path) -> Source:
    index = _read(path / "model_index.json")
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise InvalidValueError(f"{path / 'model_index.json'} does not say _class_name; give a model of diffusers")
    folders = {part: origin for part, origin in index.items() if isinstance(origin, list) and origin[0] is not None}
    configs: dict[str, Mapping[str, Any]] = {}
    for part in folders:
        for file in ("config.json", "scheduler_config.json"):
            if (path / part / file).is_file():
                content = _read(path / part / file)
                configs[part] = {key: value for key, value in content.items() if not key.startswith("_")}
    source = _of_class(name)
    with quiet():
        import diffusers
        import transformers

        libraries = {"diffusers": diffusers, "transformers": transformers}
        classes = {
            part: getattr(libraries[library], cls)
            for part, (library, cls) in folders.items()
            if library in libraries and hasattr(libraries[library], cls)
        }
    parts = {part: classes.get(part, cls) for part, cls in source.parts.items()}
    said = str(index.get("_name_or_path", ""))
    named = said if re.fullmatch(r"[\w.-]+/[\w.-]+", said) else None
    return dataclasses.replace(source, parts=parts, configs=configs, directory=path, named=named)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidValueError(f"there is no {path}; give a model directory in diffusers' layout") from None
    except ValueError as error:
        raise InvalidValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise InvalidValueError(f"{path} holds a {type(content).__name__}, expected an object; download it again")
    return content
