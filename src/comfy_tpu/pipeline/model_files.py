"""A model directory in diffusers' layout: found, checked, and opened piece by piece. Nothing in it is executed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import ComponentSpec
from comfy_tpu.config import DEMO_IMAGE_MODEL, DEMO_MODEL, GenerationSettings
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.family import SchedulerFactory, VideoFamily
from comfy_tpu.families.registry import family_of
from comfy_tpu.quiet import quiet

DEMO_DIRECTORY = Path(__file__).parents[1] / "assets" / "demo"
DEMO_DIRECTORIES = {DEMO_MODEL: DEMO_DIRECTORY, DEMO_IMAGE_MODEL: DEMO_DIRECTORY / "image_to_video"}

# Weights of components only: beside them some repositories have the whole model once more, in one file for other tools.
_WANTED = ["*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "*/*.jinja"]
_SAMPLE_BYTES = 4096


def list_model_files(directory: Path) -> list[Path]:
    """Those in a model directory that may be read: configurations, weights, vocabularies."""
    return [path for pattern in _WANTED for path in directory.glob(pattern)]


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    name: str
    directory: Path
    family: VideoFamily
    index: Mapping[str, Any]
    """Its model_index.json."""

    @classmethod
    def open(cls, model: str | Path, *, name: str | None = None, to_run: bool = True) -> ModelFiles:
        """A demo model, a directory, or the id of a model on the hub, which is then downloaded or found in its cache.

        `name` is what the model is called in labels and messages, instead of `model` itself. If it is not to run, its
        configurations are enough.
        """
        directory = _find(str(model))
        index = _read_json(directory / "model_index.json")
        described = directory / "transformer" / "config.json"
        family = family_of(index, _read_json(described) if described.is_file() else {})
        files = cls(name or str(model), directory, family, index)
        missing = [spec.name for spec in family.components if not files._config_path(spec).is_file()]
        tokenizers = [encoder.tokenizer for encoder in family.text_encoders if to_run]
        missing += [folder for folder in tokenizers if not (directory / folder).is_dir()]
        if missing:
            raise CheckpointError(
                f"model={files.name} lacks {', '.join(missing)}; a {index['_class_name']} directory has "
                f"{', '.join([*(spec.name for spec in family.components), *tokenizers])}: download it again"
            )
        for spec in family.components:
            files._check_architecture(spec)
            if to_run:
                files._check_weights(spec)
        return files

    def config(self, spec: ComponentSpec) -> dict[str, Any]:
        """The component's configuration, without the library's own notes in it."""
        return {name: value for name, value in _read_json(self._config_path(spec)).items() if not name.startswith("_")}

    def checkpoint(self, spec: ComponentSpec) -> Checkpoint:
        return Checkpoint.open(self.directory / spec.name)

    def tokenizer(self, folder: str) -> Any:
        if folder not in self._tokenizers:
            self._tokenizers[folder] = self._read_tokenizer(folder)
        return self._tokenizers[folder]

    @functools.cached_property
    def _tokenizers(self) -> dict[str, Any]:
        """Those that were read."""
        return {}

    def _read_tokenizer(self, folder: str) -> Any:
        with quiet():
            from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.directory / folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"model={self.name} has a {folder} that cannot be read ({reason}); download the model again"
            ) from error

    def image_processor(self, folder: str) -> Any:
        with quiet():
            from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self.directory / folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"model={self.name} has an {folder} that cannot be read ({reason}); download the model again"
            ) from error

    @property
    def defaults(self) -> GenerationSettings:
        """The family's, with what the directory's own files say in their place; generation.json has the last word."""
        path = self.directory / "generation.json"
        own = {**self.family.own_settings(self._read_if_there), **self._read_if_there(path.name)}
        if self.index.get("boundary_ratio") is not None:
            own.setdefault("boundary", float(self.index["boundary_ratio"]))
        known = {field.name for field in dataclasses.fields(GenerationSettings)}
        if unknown := sorted(set(own) - known):
            raise CheckpointError(
                f"{path} names {unknown[0]}, which is no setting; settings are {', '.join(sorted(known))}"
            )
        return dataclasses.replace(self.family.defaults, **own)

    @functools.cached_property
    def schedulers(self) -> Mapping[str, SchedulerFactory]:
        """By the name a user gives: the family's, and the directory's own before them."""
        return {**self.family.schedulers, **self.family.own_schedulers(self._read_if_there)}

    def _read_if_there(self, name: str) -> Mapping[str, Any]:
        path = self.directory / name
        return _read_json(path) if path.is_file() else {}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes when a configuration, the tokenizer or a tensor does, as far as three samples of each tensor tell;
        and the scheduler, where the family goes by the directory's own."""
        digest = hashlib.sha256()
        folders = [spec.name for spec in self.family.components]
        folders += (encoder.tokenizer for encoder in self.family.text_encoders)
        if self.family.own_schedulers(self._read_if_there):
            folders.append("scheduler")
        for folder in folders:
            for path in sorted((self.directory / folder).glob("*")):
                digest.update(f"{folder}/{path.name}:{path.stat().st_size};".encode())
                if path.suffix == ".safetensors":
                    digest_tensors(path, digest)
                elif path.suffix == ".json":
                    digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def _config_path(self, spec: ComponentSpec) -> Path:
        return self.directory / spec.name / "config.json"

    def _check_weights(self, spec: ComponentSpec) -> None:
        """Headers only: a file that is missing or cut short must not be found after hours of denoising."""
        try:
            self.checkpoint(spec)
        except CheckpointError as error:
            raise CheckpointError(
                f"model={self.name}: the weights of its {spec.name} cannot be used: {error}"
            ) from error

    def _check_architecture(self, spec: ComponentSpec) -> None:
        config = _read_json(self._config_path(spec))
        found = config.get("_class_name") or next(iter(config.get("architectures") or []), None)
        if found not in spec.classes:
            raise CheckpointError(
                f"{self._config_path(spec)} describes a {found}, expected {' or '.join(spec.classes)}; "
                f"this is not a {self.family.name} {spec.name}"
            )


def digest_tensors(path: Path, digest: Any) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        digest.update(header)
        for name, tensor in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            for start in (begin, (begin + end) // 2, max(end - _SAMPLE_BYTES, begin)):
                file.seek(8 + length + start)
                digest.update(file.read(min(_SAMPLE_BYTES, end - start)))


def _find(model: str) -> Path:
    if not model:
        raise InvalidValueError(f'model is empty; give a directory, a hub id such as "owner/name", or "{DEMO_MODEL}"')
    if model in DEMO_DIRECTORIES:
        return DEMO_DIRECTORIES[model]
    if Path(model).is_dir():
        return Path(model)
    if Path(model).exists():
        raise InvalidValueError(f"model={model} is a file; give a model directory in diffusers' layout")
    if is_hub_id(model):
        return _download(model)
    raise InvalidValueError(
        f'model={model} is not a directory; give one, a hub id such as "owner/name", or "{DEMO_MODEL}"'
    )


def is_hub_id(model: str) -> bool:
    """Whether it reads as owner/name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII) is not None


def find_local(model: str) -> Path | None:
    """Where a model is on this machine: a demo model, a directory, or an earlier download of a hub id.

    For names that a file gives: nothing is asked of a network.
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
        return Path(snapshot_download(model, allow_patterns=_WANTED, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"model={model} is not a directory here and could not be had from the hub ({reason}); check the name and "
            "the network, or download it elsewhere and give its directory"
        ) from error


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a model directory in diffusers' layout") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object; download the model again")
    return content
