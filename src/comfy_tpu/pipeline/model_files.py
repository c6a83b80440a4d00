"""A model directory in diffusers' layout: found, checked, and opened piece by piece. Nothing in it is executed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.compiler.stored import ProgramStore
from comfy_tpu.compiler.weights import WeightSource
from comfy_tpu.config import DEMO_IMAGE_MODEL, DEMO_MODEL, GenerationSettings
from comfy_tpu.distribution import restore_command
from comfy_tpu.errors import CheckpointError, InvalidValueError, UnsupportedError, config_errors
from comfy_tpu.families.card import SCHEDULER_FILE, Preset
from comfy_tpu.families.context import window_counts
from comfy_tpu.families.model_family import ModelFamily, SchedulerFactory
from comfy_tpu.families.registry import find_model_card, load_family
from comfy_tpu.families.settings import check_settings, make_settings
from comfy_tpu.families.shared.config_checks import check_index, check_sizes, clean_config
from comfy_tpu.families.variants import find_exact, find_similar
from comfy_tpu.hub.download import Place, check_space, find_needed
from comfy_tpu.hub.repository import open_repository
from comfy_tpu.json_input import parse_json, read_json
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.config_files import check_configs, check_published, check_repository, find_class_name
from comfy_tpu.pipeline.plain_tokenizer import PlainTokenizer
from comfy_tpu.pipeline.preview_colours import PREVIEW_FILE, PreviewColours
from comfy_tpu.pipeline.schedule import noise_levels
from comfy_tpu.pipeline.step_work import count_step
from comfy_tpu.quiet import quiet
from comfy_tpu.terminal_text import excerpt

DEMO_DIRECTORY = Path(__file__).parents[1] / "assets" / "demo"
DEMO_DIRECTORIES = {DEMO_MODEL: DEMO_DIRECTORY, DEMO_IMAGE_MODEL: DEMO_DIRECTORY / "image_to_video"}

# Weights of components only: beside them some repositories have the whole model once more, in one file for other tools.
_DOWNLOAD_PATTERNS = ["*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "*/*.jinja"]
_SMALL_FILE_PATTERNS = [pattern for pattern in _DOWNLOAD_PATTERNS if "safetensors" not in pattern]
_SAMPLE_BYTES = 4096
_CHANNELS_MAX = 2**16
_COUNT = re.compile("^num_|layers|blocks|depth|channels")
_COUNT_MAX = 2**20
_INTEGER_MAX = 2**64 - 1


def list_model_files(directory: Path) -> list[Path]:
    """The files of a model directory that may be read: configurations, weights, vocabularies."""
    return [path for pattern in _DOWNLOAD_PATTERNS for path in directory.glob(pattern)]


PRESETS_FILE = "presets.json"
"""The presets of a model directory, in place of its family's: {NAME: {"settings": {…}, "lora": PATH}}, the LoRA in the
directory, or without one."""

SHARED_PARTS_FILE = "shared_parts.json"
"""Lists the parts of a model directory that are kept in the directory above it: {"from_parent": ["vae", ...]}.

Names only, so that a downloaded model cannot refer to any other place. Not symbolic links: wheel builders follow those,
keep one of two equal folders, and a checkout or an archive need not support them.
"""


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    name: str
    directory: Path
    family: ModelFamily
    index: Mapping[str, Any]
    """The content of model_index.json."""
    shared_parts: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)
    """Names of the folders and files that are kept in the directory above `directory`."""
    hub_id: str = dataclasses.field(default="", kw_only=True)
    """The published model that this is; "" for any other."""
    ignored_keys: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        name: str | None = None,
        to_run: bool = True,
        ignored_keys: Collection[str] = (),
    ) -> ModelFiles:
        """Opens a demo model, a directory, or a model by its hub id, downloading it unless it is in the hub's cache.

        `name` replaces `model` in labels and messages. With `to_run=False`, configurations are enough. `ignored_keys`:
        see `RuntimeConfig.ignored_config_keys`.
        """
        directory = _find(str(model), ignored_keys)
        index = _read_json(directory / "model_index.json")
        shared = _read_shared_parts(directory)
        described = _part_path(directory, shared, "transformer/config.json")
        transformer = _read_json(described) if described.is_file() else {}
        scheduled = _part_path(directory, shared, SCHEDULER_FILE)
        scheduler = _read_json(scheduled) if scheduled.is_file() else {}
        with config_errors(str(described)):
            card = find_model_card(index, transformer, scheduler)
            if reason := card.refuses(transformer):
                raise UnsupportedError(f"model={name or model}: {reason}", field="model")
            family = load_family(card.name)
        label = name or str(model)
        ignored = frozenset(ignored_keys)
        hub_id = find_exact(card, (label, directory.name))
        files = cls(label, directory, family, index, shared_parts=shared, hub_id=hub_id, ignored_keys=ignored)
        check_index(index, [spec.name for spec in family.components], directory / "model_index.json", ignored)
        missing = [spec.name for spec in family.components if not files._config_path(spec).is_file()]
        folders = [folder for encoder in family.text.encoders for folder in encoder.folders if to_run]
        if to_run and family.media is not None and family.media.encoder is not None:
            folders.append(family.media.processor)
        missing += [folder for folder in folders if not files.path(folder).is_dir()]
        if missing:
            raise CheckpointError(
                f"model={files.name} lacks {', '.join(missing)}; a {index['_class_name']} directory has "
                f"{', '.join([*(spec.name for spec in family.components), *folders])}: {_advice(directory)}",
                field="model",
            )
        check_sizes(transformer, next(iter(family.card.published.values()), {}))
        check_configs(family, index, files._read_optional_json, files.path, ignored_keys)
        check_published((label, directory.name), card, files._read_optional_json, files.path)
        for spec in family.components if to_run else ():
            files._check_weights(spec)
        _ = files.latent_statistics  # checks them
        return files

    def path(self, name: str) -> Path:
        """The path of a part: a folder, or a file by its path inside the model directory."""
        return _part_path(self.directory, self.shared_parts, name)

    def config(self, spec: ComponentSpec) -> dict[str, Any]:
        """The component's configuration, without the keys that have no effect."""
        return dict(self._configs[spec.name])

    @functools.cached_property
    def _configs(self) -> dict[str, dict[str, Any]]:
        """The configurations by component."""
        return {spec.name: self._clean_config(spec) for spec in self.family.components}

    def _clean_config(self, spec: ComponentSpec) -> dict[str, Any]:
        path = self._config_path(spec)
        config = _read_json(path)
        kept = clean_config(config, find_class_name(config, spec, self.index), path, self.ignored_keys)
        return {name: value for name, value in kept.items() if not name.startswith("_")}

    def checkpoint(self, spec: ComponentSpec) -> WeightSource:
        return Checkpoint.open(self.path(spec.name))

    def tokenizer(self, folder: str, *, may_be_plain: bool = False) -> Any:
        """The tokenizer of transformers, or, if it `may_be_plain` and is, a `PlainTokenizer`."""
        key = (folder, may_be_plain)
        if key not in self._tokenizers:
            self._tokenizers[key] = self._read_tokenizer(*key)
        return self._tokenizers[key]

    @functools.cached_property
    def _tokenizers(self) -> dict[tuple[str, bool], Any]:
        """Tokenizers that were read."""
        return {}

    def _read_tokenizer(self, folder: str, may_be_plain: bool) -> Any:
        try:
            if may_be_plain and (plain := PlainTokenizer.open(self.path(folder))) is not None:
                return plain
            with quiet():
                from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.path(folder), trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises nothing more special
            raise CheckpointError(
                f"model={self.name} has a {folder} that cannot be read ({_reason(error)}); {_advice(self.directory)}",
                field="model",
            ) from error

    def image_processor(self, folder: str) -> Any:
        with quiet():
            from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self.path(folder), trust_remote_code=False)
        except Exception as error:  # as of tokenizers: any value of the file may lead to any error
            raise CheckpointError(
                f"model={self.name} has an {folder} that cannot be read ({_reason(error)}); {_advice(self.directory)}",
                field="model",
            ) from error

    @property
    def defaults(self) -> GenerationSettings:
        """Those of the published model, or the family's, replaced by those of the directory's files; generation.json
        takes precedence. A published model has its makers' values, whatever its conversion wrote into those files."""
        card, path = self.family.card, self.path("generation.json")
        with config_errors(f"the scheduler_config.json or guider_config.json of model={self.name}"):
            read = {} if self.hub_id else self.family.scheduling.own_settings(self._read_own)
        names = (self.name, self.directory.name)
        similar = self.hub_id or find_similar(card, names, self.config(self.family.transformer), read.get("flow_shift"))
        own = {**card.own_defaults.get(similar, {}), **read, **self._read_optional_json(path.name)}
        if self.index.get("boundary_ratio") is not None:
            own.setdefault("boundary", self.index["boundary_ratio"])
        known = {field.name for field in dataclasses.fields(GenerationSettings)}
        if unknown := sorted(set(own) - known):
            raise CheckpointError(
                f"{path} names {unknown[0]}, which is no setting; settings are {', '.join(sorted(known))}"
            )
        defaults = dataclasses.replace(card.defaults, **own)
        try:
            check_settings(defaults, card.limits)
        except InvalidValueError as error:
            raise CheckpointError(
                f"model={self.name} brings defaults that cannot be used, in its generation.json, model_index.json or "
                f"scheduler: {error}; download the model again",
                field="model",
            ) from error
        return defaults

    @functools.cached_property
    def presets(self) -> Mapping[str, Preset]:
        """Presets by name: those of presets.json where the directory has it, else the family's."""
        path = self.path(PRESETS_FILE)
        if not path.is_file():
            return self.family.card.presets
        return {name: self._read_preset(path, name, value) for name, value in _read_json(path).items()}

    def _read_preset(self, path: Path, name: str, value: Any) -> Preset:
        try:
            preset = Preset(dict(value["settings"]), lora=value.get("lora", ""))
            if set(value) - {"settings", "lora"} or not isinstance(preset.lora, str):
                raise ValueError("it has other keys than settings and lora")
            make_settings(self.defaults, preset.settings, self.family.card.limits)
            if preset.lora and not _is_inside(preset.lora):
                raise ValueError(f"lora={preset.lora!r} is not a path inside the model directory")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the preset {name} cannot be used ({_reason(error)}); {_advice(self.directory)}", field="model"
            ) from error
        return preset

    @property
    def transformer_names(self) -> tuple[str, ...]:
        """Names that may say what the transformer was made for."""
        return (self.name,)

    @functools.cached_property
    def preview_colours(self) -> PreviewColours | None:
        """The colours of latents in previews, from preview.json; None: those of the family's latents."""
        document = self._read_optional_json(PREVIEW_FILE)
        return PreviewColours.read(document, self.latent_channels, self.path(PREVIEW_FILE)) if document else None

    @functools.cached_property
    def schedulers(self) -> Mapping[str, SchedulerFactory]:
        """Schedulers by their names: the directory's own, then the family's."""
        with self.scheduler_errors():
            own = self.family.scheduling.own_schedulers(self._read_own)
        return {**self.family.scheduling.factories, **own}

    def scheduler(self, settings: GenerationSettings) -> Any:
        """The scheduler that the settings name, with its timesteps set."""
        with self.scheduler_errors(), np.errstate(all="ignore"):  # a division by zero shows in the levels
            scheduler = self.schedulers[settings.scheduler](settings)
            levels = noise_levels(scheduler, 0, scheduler.timesteps).tolist()
        if not all(math.isfinite(level) for level in levels):
            raise InvalidValueError(
                f"num_inference_steps={settings.num_inference_steps} at flow_shift={settings.flow_shift:g} gives noise "
                f"levels that are not finite numbers; choose others, or look at {self.path(SCHEDULER_FILE)}",
                field="num_inference_steps",
            )
        return scheduler

    def scheduler_errors(self) -> AbstractContextManager[None]:
        return config_errors(f"{self.path(SCHEDULER_FILE)}")

    def workload(
        self, settings: GenerationSettings, store: ProgramStore | None = None, *, windows: int = 1
    ) -> Workload:
        """The cost of one step; `store` may know it from an earlier process. `windows`: those in a call, for a long
        video."""
        config = self.config(self.family.transformer)
        with config_errors(str(self._config_path(self.family.transformer))):
            return count_step(self.family, config, settings, self.latent_channels, store, windows=windows)

    def workloads(self, settings: GenerationSettings, store: ProgramStore | None = None) -> list[Workload]:
        """The cost of one step with each number of windows in a call; of a video without windows, one."""
        counts = window_counts(self.family.card, settings)
        return [self.workload(settings, store, windows=windows) for windows in counts]

    def embedding_shapes(self, settings: GenerationSettings) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the embeddings of one prompt, by name, without the batch dimension."""
        config = self.config(self.family.transformer)
        with config_errors(str(self._config_path(self.family.transformer))):
            try:
                shapes = self.family.text.embedding_shapes(config, settings)
            except KeyError as error:
                raise self._damaged_error(f"has {error.args[0]}=None") from error
        if odd := [name for name, shape in shapes.items() if not all(isinstance(size, int) for size in shape)]:
            raise self._damaged_error(f"makes {odd[0]} of shape {shapes[odd[0]]}")
        return shapes

    def given_shapes(self, settings: GenerationSettings) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the embeddings of a prompt and of given media: of all segments, where a video has several."""
        media, config = self.family.media, self.config(self.family.transformer)
        if media is None or media.segments is None or settings.context == "none":
            return self.embedding_shapes(settings)
        with config_errors(str(self._config_path(self.family.transformer))):
            return media.segments.embedding_shapes(config, settings)

    def _damaged_error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"model={self.name}: the config.json of its transformer {what}, expected whole numbers; download the model "
            "again"
        )

    @property
    def latent_channels(self) -> int:
        with config_errors(str(self._config_path(self.family.vae.component))):
            channels = self.family.vae.latent_channels(self.config(self.family.vae.component))
        if not 1 <= channels <= _CHANNELS_MAX:
            raise CheckpointError(
                f"{self._config_path(self.family.vae.component)} describes latents of {channels} channels, expected 1 "
                f"to {_CHANNELS_MAX}; download the model again"
            )
        return channels

    @property
    def latent_statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of the VAE's latents, by channel."""
        with config_errors(str(self._config_path(self.family.vae.component))):
            mean, deviation = self.family.vae.latent_statistics(self.config(self.family.vae.component))
            if [len(mean), len(deviation)] != 2 * [self.latent_channels]:
                lengths = f"{len(mean)} means and {len(deviation)} deviations"
                raise ValueError(f"{lengths} for latents of {self.latent_channels} channels")
            if not all(math.isfinite(value) for value in (*mean, *deviation)) or not all(deviation):
                raise ValueError("a mean or deviation of the latents is infinite, or a deviation 0")
        return mean, deviation

    def _read_optional_json(self, name: str) -> Mapping[str, Any]:
        path = self.path(name)
        return _read_json(path) if path.is_file() else {}

    def _read_own(self, name: str) -> Mapping[str, Any]:
        """A file of the scheduler or the guider, without the keys that have no effect."""
        config = self._read_optional_json(name)
        return clean_config(config, str(config.get("_class_name")), self.path(name), self.ignored_keys)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A fingerprint of configurations, tokenizers and three samples of each tensor; and of the scheduler, where the
        family uses the directory's own."""
        digest = hashlib.sha256()
        folders = [spec.name for spec in self.family.components]
        folders += (folder for encoder in self.family.text.encoders for folder in encoder.folders)
        if self.family.scheduling.own_schedulers(self._read_own):
            folders.append("scheduler")
        for folder in folders:
            for path in sorted(self.path(folder).glob("*")):
                with _read_errors(path):
                    digest.update(f"{folder}/{path.name}:{path.stat().st_size};".encode())
                    if path.suffix == ".json":
                        digest.update(path.read_bytes())
                if path.suffix == ".safetensors":
                    digest_tensors(path, digest)
        return digest.hexdigest()[:16]

    def _config_path(self, spec: ComponentSpec) -> Path:
        return self.path(spec.name) / "config.json"

    def _check_weights(self, spec: ComponentSpec) -> None:
        """Checks headers of the weights, so that a missing or truncated file is not found after hours of denoising."""
        try:
            self.checkpoint(spec)
        except CheckpointError as error:
            advice = f"; {_advice(self.directory)}" if _is_demo(self.directory) else ""
            raise CheckpointError(
                f"model={self.name}: the weights of its {spec.name} cannot be used: {error}{advice}", field="model"
            ) from error


def _read_shared_parts(directory: Path) -> frozenset[str]:
    path = directory / SHARED_PARTS_FILE
    if not path.is_file():
        return frozenset()
    content = _read_json(path)
    names = content.get("from_parent")
    if set(content) != {"from_parent"} or not isinstance(names, list) or not all(map(_is_plain_name, names)):
        raise CheckpointError(
            f'{path} holds {content!r}, expected {{"from_parent": [names of folders and files]}} without '
            f"slashes; {_advice(directory)}"
        )
    return frozenset(names)


def _part_path(directory: Path, shared_parts: frozenset[str], name: str) -> Path:
    # Resolved: the directory may be "." or reached through a link, and its parent is meant, not the link's.
    return (directory.resolve().parent if name.partition("/")[0] in shared_parts else directory) / name


def _is_inside(path: str) -> bool:
    return all(_is_plain_name(part) for part in path.split("/"))


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Names the file: an error of reading, unlike one of opening, does not."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}); look at the disk, or download it again"
        ) from error


def digest_tensors(path: Path, digest: Any) -> None:
    with _read_errors(path), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        digest.update(header)
        for name, tensor in parse_json(header).items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            for start in (begin, (begin + end) // 2, max(end - _SAMPLE_BYTES, begin)):
                file.seek(8 + length + start)
                digest.update(file.read(min(_SAMPLE_BYTES, end - start)))


def _find(model: str, ignored_keys: Collection[str]) -> Path:
    if not model:
        raise InvalidValueError(
            f'model is empty; give a directory, a hub id such as "owner/name", or "{DEMO_MODEL}"', field="model"
        )
    if model in DEMO_DIRECTORIES:
        return DEMO_DIRECTORIES[model]
    if os.path.isdir(model):  # noqa: PTH112 - False of a name that is too long, where a Path raises
        return Path(model)
    if os.path.exists(model):  # noqa: PTH110
        raise InvalidValueError(f"model={model} is a file; give a model directory in diffusers' layout", field="model")
    if is_hub_id(model):
        return _download(model, ignored_keys)
    raise InvalidValueError(
        f'model={excerpt(model)} is not a directory; give one, a hub id such as "owner/name", or "{DEMO_MODEL}"',
        field="model",
    )


def is_hub_id(model: str) -> bool:
    """Whether a name has the form owner/name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII) is not None


def find_local(model: str) -> Path | None:
    """The directory of a model on this machine: a demo model, a directory, or an earlier download of a hub id.

    For names that a file holds: the network is not used.
    """
    if model in DEMO_DIRECTORIES:
        return DEMO_DIRECTORIES[model]
    if not model or model.startswith(("//", "\\\\")):  # a directory of another machine, on Windows
        return None
    with contextlib.suppress(OSError):  # pathlib raises for a name that is too long or may not be looked up
        if Path(model).is_dir():
            return Path(model)
    return _find_download(model) if is_hub_id(model) else None


def _find_download(model: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_DOWNLOAD_PATTERNS, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _download(model: str, ignored_keys: Collection[str]) -> Path:
    try:
        return _download_files(model, _needed_names(model, ignored_keys))
    except _DownloadError as error:
        raise CheckpointError(
            f"model={model} is not a directory here and could not be downloaded from the hub ({error}); check the "
            "name and the network, or download it elsewhere and give its directory",
            field="model",
        ) from error


def _needed_names(model: str, ignored_keys: Collection[str]) -> list[str]:
    """The files that a model needs, without other forms of the same weights. Raises InvalidValueError where the disk
    has no room for them. Where the hub does not answer, patterns: what was downloaded earlier may be enough."""
    try:
        place = Place(open_repository(model))
    except CheckpointError:
        return _DOWNLOAD_PATTERNS
    needed = find_needed(place, functools.partial(check_repository, model=model, ignored=ignored_keys))
    check_space(place, needed)
    return [file.name for file in needed]


def download_small_files(base: str, name: str) -> Path:
    """The directory of a hub id without its weights: the configurations and tokenizers that single files lack."""
    try:
        return _download_files(base, _SMALL_FILE_PATTERNS)
    except _DownloadError as error:
        raise CheckpointError(
            f"{name} holds no tokenizer, and that of {base} is not on this machine and could not be downloaded from "
            f"the hub ({error}); download it elsewhere, a few MB, and give its directory: "
            f'`hf download {base} --include "*.json" "tokenizer*/*"`',
            field="model",
        ) from error


class _DownloadError(Exception):
    """The reason why the hub gave no files, in one line."""


def _download_files(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _DownloadError(str(error).strip().splitlines()[0]) from error


def _advice(path: Path) -> str:
    if _is_demo(path):
        return f"it is part of comfy-tpu, restore it: {restore_command('src/comfy_tpu/assets')}"
    return "download the model again"


def _is_demo(path: Path) -> bool:
    return path.resolve().is_relative_to(DEMO_DIRECTORY.resolve())


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a model directory in diffusers' layout") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {_advice(path)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object; {_advice(path)}")
    _check_counts(path, content)
    return content


def _check_counts(path: Path, content: Mapping[str, Any]) -> None:
    """Raises CheckpointError for huge counts and for NaN.

    Libraries make lists of a configuration's length before they build the first layer, and accept NaN, which Python's
    JSON allows, as a number. Infinity may be intended: schedulers have lambda_min_clipped=-Infinity.
    """
    for name, value in content.items():
        if isinstance(value, Mapping):
            _check_counts(path, value)
        if isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"{path}: {name}=nan is not a number; download the model again")
        limit = _COUNT_MAX if _COUNT.search(name) else _INTEGER_MAX
        # transformers writes int(1e30) as the length of a tokenizer without a limit.
        if isinstance(value, int) and abs(value) > limit and name != "model_max_length":
            raise CheckpointError(
                f"{path} has {name}={str(value)[:40]}, expected {limit} at most; download the model again"
            )


def _reason(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
