"""A model in single files: its family found by the transformer's shapes, its parts read under a directory's names.

Configurations and tokenizers are not in such files. They come from a model directory, from the hub's, or, as far as
configurations go, from the family's published ones.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from comfy_tpu.bridge import build_skeleton, weight_shapes
from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.single_file import PartFile, open_single_file
from comfy_tpu.compiler.weights import WeightSource
from comfy_tpu.config import SingleFiles
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError, config_errors, join_names
from comfy_tpu.families.card import SCHEDULER_FILE, Config, ModelCard, Preset
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.presets import file_names
from comfy_tpu.families.registry import find_family_card, find_model_card, find_published, load_family, model_cards
from comfy_tpu.families.shared.config_checks import check_absent, check_scheduler, clean_config
from comfy_tpu.families.shared.published import known_configs, part_configs
from comfy_tpu.families.variants import find_named
from comfy_tpu.json_input import read_json
from comfy_tpu.pipeline.lora_keys import holds_factors
from comfy_tpu.pipeline.model_files import (
    ModelFiles,
    digest_tensors,
    download_small_files,
    find_local,
    is_hub_id,
)
from comfy_tpu.quiet import quiet

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SingleFileModel(ModelFiles):
    """`directory` is that of the base model, whose tokenizers are used; its weights are not read."""

    files: Mapping[str, Path] = dataclasses.field(default_factory=dict, kw_only=True)
    """The file of each component, by the component's name."""
    configs: Mapping[str, Config] = dataclasses.field(default_factory=dict, kw_only=True)
    """The configuration of each component, by the component's name."""

    def config(self, spec: ComponentSpec) -> dict[str, Any]:
        return dict(self.configs[spec.name])

    @property
    def presets(self) -> Mapping[str, Preset]:
        """The family's: those of the base directory are for its own weights."""
        return self.family.card.presets

    @property
    def transformer_names(self) -> tuple[str, ...]:
        return tuple(self.files[spec.name].stem for spec in self.family.denoiser.transformers)

    def checkpoint(self, spec: ComponentSpec) -> WeightSource:
        part = self.family.single_files[spec.name]
        return part.open(open_single_file(self.files[spec.name]), self.configs[spec.name], self._part_name(spec))

    def _part_name(self, spec: ComponentSpec) -> str:
        return f"{self.family.name} {spec.name.replace('_', ' ')}"

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, path in sorted(self.files.items()):
            digest.update(
                f"{name}:{path.stat().st_size};{json.dumps(dict(self.configs[name]), sort_keys=True)}".encode()
            )
            digest_tensors(path, digest)
        folders = [folder for encoder in self.family.text.encoders for folder in encoder.folders]
        if self.family.scheduling.own_schedulers(self._read_optional_json):
            folders.append("scheduler")
        for folder in folders:
            for path in sorted(self.path(folder).glob("*.json")):
                digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


def open_model(
    model: str | Path | SingleFiles, *, name: str | None = None, ignored_keys: Collection[str] = ()
) -> ModelFiles:
    """Opens a demo model, a directory, a hub id, or single files. `name` replaces the model's in messages."""
    if isinstance(model, SingleFiles):
        return _open(model, name, ignored_keys)
    return ModelFiles.open(model, name=name, ignored_keys=ignored_keys)


def _open(given: SingleFiles, name: str | None, ignored_keys: Collection[str]) -> SingleFileModel:
    opened = {path: open_single_file(path) for path in given.paths}
    for path, checkpoint in opened.items():
        if holds_factors(checkpoint.tensors):
            raise CheckpointError(
                f"{path} is a LoRA, not a part of a model; give it as a LoRA, and here the model's file"
            )
    transformers = [opened[path] for path in given.transformers]
    if not 1 <= len(transformers) <= 2:
        raise InvalidValueError(
            f"transformer is given {len(transformers)} times; give one file, or those for high and for low noise",
            field="transformer",
        )
    name = name or given.transformers[0].name
    if given.base is None:
        names = [name for path in given.transformers for name in file_names(path, _read_metadata(path))]
        hub_id, card = _detect(transformers, names)
        directory = _base_directory(hub_id, name)
    else:
        directory = _base_directory(given.base, name)
        hub_id, card = _base_card(given.base, directory)
    family = load_family(card.name)
    _check_count(given, family)
    files = _assign(given, opened, family)
    configs = {spec.name: _config(spec, family, directory, hub_id, ignored_keys) for spec in family.components}
    index = {"_class_name": card.pipeline_classes[0]}
    ignored = frozenset(ignored_keys)
    model = SingleFileModel(
        name, directory, family, index, files=files, configs=configs, hub_id=hub_id, ignored_keys=ignored
    )
    check_scheduler(model._read_optional_json(SCHEDULER_FILE), model.path(SCHEDULER_FILE), ignored)
    for spec in family.components:
        model.checkpoint(spec)  # converts the names
    _check_folders(model, hub_id)
    return model


def _check_count(given: SingleFiles, family: ModelFamily) -> None:
    if not family.single_files:
        raise UnsupportedError(
            f"{family.name} is not read from single files, only {_readable_models()} are; give the model's directory "
            "or hub id"
        )
    expected = family.card.transformer_count
    if len(given.transformers) != expected:
        what = "two transformers, for high and for low noise" if expected == 2 else "one transformer"
        raise InvalidValueError(
            f"{family.name} has {what}, and {len(given.transformers)} is given; choose {expected} files",
            field="transformer",
        )


def _assign(given: SingleFiles, opened: Mapping[Path, Checkpoint], family: ModelFamily) -> dict[str, Path]:
    """The file of each component. Text encoders are told apart by their names."""
    files = {spec.name: path for spec, path in zip(family.denoiser.transformers, given.transformers, strict=True)}
    files[family.vae.component.name] = given.vae
    left = list(given.text_encoders)
    for encoder in family.text.encoders:
        part = family.single_files[encoder.component.name]
        fitting = [path for path in left if part.matches(opened[path])]
        if not fitting:
            others = f"; {join_names([path.name for path in left])} is none" if left else ""
            raise InvalidValueError(
                f"{family.name} needs a text encoder file with {part.expected}{others}; give one for each of its "
                f"{len(family.text.encoders)} text encoders",
                field="text_encoder",
            )
        left.remove(fitting[0])
        files[encoder.component.name] = fitting[0]
    if left:
        raise InvalidValueError(
            f"{left[0].name} is one text encoder too many: {family.name} has {len(family.text.encoders)}; leave it out",
            field="text_encoder",
        )
    image_encoder = family.media.encoder if family.media is not None else None
    if (image_encoder is None) != (given.image_encoder is None):
        raise InvalidValueError(
            f"{family.name} has no image encoder; leave it out"
            if image_encoder is None
            else f"{family.name} needs an image encoder: give its CLIP vision file",
            field="image_encoder",
        )
    if image_encoder is not None and given.image_encoder is not None:
        files[image_encoder.name] = given.image_encoder
    for component, path in files.items():
        part = family.single_files[component]
        if not part.matches(opened[path]):
            raise CheckpointError(part.mismatch(opened[path], f"{family.name} {component.replace('_', ' ')}"))
    return files


def _base_directory(base: str, name: str) -> Path:
    directory = find_local(base)
    if directory is not None:
        return directory
    if not is_hub_id(base):
        raise InvalidValueError(
            f"model={base} is not a directory; give the directory or hub id that has the tokenizers of {name}",
            field="model",
        )
    return download_small_files(base, name)


def _base_card(base: str, directory: Path) -> tuple[str, ModelCard]:
    published = find_published(base)
    if published is not None:
        return published
    index, *described = (directory / name for name in ("model_index.json", "transformer/config.json", SCHEDULER_FILE))
    if not index.is_file():
        raise CheckpointError(f"{index} does not exist; give a model directory in diffusers' layout", field="model")
    with config_errors(str(index)):
        return "", find_model_card(read_json(index), *(read_json(path) if path.is_file() else {} for path in described))


def _check_folders(model: SingleFileModel, hub_id: str) -> None:
    family = model.family
    folders = [folder for encoder in family.text.encoders for folder in encoder.folders]
    if family.media is not None and family.media.encoder is not None:
        folders.append(family.media.processor)
    if missing := [folder for folder in folders if not model.path(folder).is_dir()]:
        raise CheckpointError(
            f"{model.directory} lacks {' and '.join(missing)}, which single files do not hold; "
            f"{_download_advice(hub_id or family.card.name, missing)}",
            field="model",
        )


def _download_advice(base: str, folders: Sequence[str]) -> str:
    patterns = " ".join(f'"{folder}/*"' for folder in folders)
    return f"download them, a few MB: `hf download {base} --include {patterns}`, or give a directory that has them"


def _config(
    spec: ComponentSpec, family: ModelFamily, directory: Path, hub_id: str, ignored_keys: Collection[str]
) -> Config:
    """The configuration in the base directory, else the published one."""
    path = directory / spec.name / "config.json"
    package = find_family_card(family.card).package
    if path.is_file():
        with config_errors(str(path)):
            config = read_json(path)
            found = clean_config(config, spec.classes[0], path, ignored_keys)
            check_absent(config, known_configs(package, hub_id).get(spec.name, {}), path)
        return {name: value for name, value in found.items() if not name.startswith("_")}
    if spec in family.denoiser.transformers and hub_id in family.card.published:
        return family.card.published[hub_id]
    configs = part_configs(package, hub_id)
    if spec.name not in configs:
        raise CheckpointError(
            f"{path} does not exist, and no configuration of that {spec.name} is built in; give a model directory that "
            "has one",
            field="model",
        )
    return {**_class_defaults(spec), **configs[spec.name]}


def _class_defaults(spec: ComponentSpec) -> dict[str, Any]:
    """The default configuration of diffusers' class; empty for a class of transformers, which has its own defaults."""
    with quiet():
        import diffusers

    model_class = getattr(diffusers, spec.classes[0], None)
    parameters = inspect.signature(model_class).parameters if model_class is not None else {}
    return {
        name: parameter.default for name, parameter in parameters.items() if parameter.default is not inspect._empty
    }


def _detect(transformers: Sequence[Checkpoint], names: Sequence[str]) -> tuple[str, ModelCard]:
    """The hub id and card of the published model whose transformer has the shapes of these files. `names`: what tells
    between models of equal shapes."""
    source, found = transformers[0], dict[str, ModelCard]()
    recognised, nearest = False, dict[str, list[str]]()
    for card in model_cards():
        if not card.reads_single_files:
            continue
        family = load_family(card.name)
        part = family.single_files[family.transformer.name]
        if not part.matches(source):
            continue
        recognised = True
        for hub_id, config in card.published.items():
            differences = _find_differences(source, part, family.transformer, card.name, hub_id, config)
            if differences is not None:
                nearest[hub_id] = differences
            if differences == []:
                found[hub_id] = card
    fitting = {hub_id: card for hub_id, card in found.items() if card.transformer_count == len(transformers)}
    if fitting:
        hub_id = find_named(names, fitting) or _choose_first(source.path.name, fitting)
        return hub_id, fitting[hub_id]
    if found:
        hub_id, card = next(iter(found.items()))
        count = "two transformers: give the files for high and for low noise"
        raise InvalidValueError(
            f"{source.path.name} is a transformer of {card.name}, which has "
            f"{count if card.transformer_count == 2 else 'one transformer: give one file'}",
            field="transformer",
        )
    if recognised:
        hub_id, differences = min(nearest.items(), key=lambda item: len(item[1]), default=("", []))
        closest = f" (the closest is {hub_id}: the file {join_names(differences, 3)})" if differences else ""
        raise CheckpointError(
            f"{source.path.name} has the names of a known transformer, but the shapes of no published one{closest}; "
            "choose the model directory or hub id that it belongs to",
            field="model",
        )
    raise CheckpointError(
        f"{source.path.name} is no transformer that is known here: it holds {join_names(list(source.tensors), 3)}; "
        f"single files of {_readable_models()} are read",
        field="transformer",
    )


def _read_metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def _choose_first(file: str, fitting: Mapping[str, ModelCard]) -> str:
    """The first of several published models of equal shapes, with a warning if their defaults differ."""
    first, card = next(iter(fitting.items()))
    if cards := sorted({other.name for other in fitting.values()} - {card.name}):
        raise InvalidValueError(
            f"{file} may be a {' or a '.join(sorted((card.name, *cards)))}, which have the same shapes; say which: "
            f"{' or '.join(fitting)}",
            field="model",
        )
    if any(card.defaults_of(other) != card.defaults_of(first) for other in fitting):
        logger.warning(
            "%s has the shapes of %s, and its name does not say which; it runs with the defaults of %s. Choose the "
            "model that it belongs to for others",
            file,
            " and ".join(fitting),
            first,
            extra={"field": "model"},
        )
    return first


def _readable_models() -> str:
    return ", ".join(card.name for card in model_cards() if card.reads_single_files)


def _find_differences(
    source: WeightSource, part: PartFile, spec: ComponentSpec, model: str, hub_id: str, config: Config
) -> list[str] | None:
    """What a file lacks, and has besides or in another shape than a published transformer; None if it is not whole."""
    try:
        converted = part.open(source, config, model)
    except CheckpointError:
        return None
    shapes = {spec.rename(name) if spec.rename else name: info.shape for name, info in converted.tensors.items()}
    wanted = published_shapes(model, hub_id)
    extra = [name for name in shapes if name not in wanted]
    return [
        *(f"lacks {name}" for name in wanted if name not in shapes),
        *(f"also has {name}" for name in extra if not any(fnmatch.fnmatchcase(name, each) for each in spec.unused)),
        *(
            f"has {name} in shape {shapes[name]} instead of {shape}"
            for name, shape in wanted.items()
            if shapes.get(name, shape) != shape
        ),
    ]


@functools.cache
def published_shapes(model: str, hub_id: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a published transformer, by name. `model`: the name of its card."""
    family = load_family(model)
    with quiet():
        skeleton = build_skeleton(lambda: family.transformer.build(family.card.published[hub_id]))
    return {name: tuple(tensor.shape) for name, tensor in weight_shapes(skeleton).items()}
