"""Chooses the files of a repository that a model needs.

Weights are the safetensors of the components that model_index.json names, each once: repositories also hold pickles,
the same weights in half precision, and whole models in one file for other tools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comfy_tpu.compiler.weight_names import SHARD_NAME, SUFFIX, choose_weights, group_weights
from comfy_tpu.errors import CheckpointError

INDEX = "model_index.json"
_ROOT_SUFFIXES = (".json",)
_FOLDER_SUFFIXES = (".json", ".model", ".txt", ".jinja")


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    """Its path, with slashes."""
    size: int
    sha256: str | None = None
    """Of large files only."""

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def base(self) -> str:
        """The name without its folder."""
        return self.name.rpartition("/")[2]


def read_components(index: Any, model: str) -> list[str]:
    """The names of the components, from the content of model_index.json."""
    found = [name for name, value in index.items() if _is_component(name, value)] if isinstance(index, dict) else []
    if not found:
        raise CheckpointError(
            f"model={model}: its {INDEX} names no components; give the hub id of a model in diffusers' layout",
            field="model",
        )
    return found


def select_files(files: Sequence[RemoteFile], index: Mapping[str, Any], model: str) -> list[RemoteFile]:
    """The files that a model needs, smallest first. `index`: the content of its model_index.json."""
    folders = read_components(index, model)
    needed = [file for file in files if not file.folder and file.base.endswith(_ROOT_SUFFIXES)]
    for folder in folders:
        inside = {file.base: file for file in files if file.folder == folder}
        weights = _select_weights(inside)
        groups = group_weights(inside)
        of_weights = {name for group in groups.values() for name in (group.index, *group.files)}
        needed += (inside[name] for name in weights)
        needed += (file for name, file in inside.items() if name.endswith(_FOLDER_SUFFIXES) and name not in of_weights)
    return sorted(needed, key=lambda file: (file.size, file.name))


def _is_component(name: str, value: Any) -> bool:
    """ "vae": ["diffusers", "AutoencoderKLWan"]; one that a model does without is [null, null]. Its name is a folder's,
    which is to be inside the model's."""
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    return is_pair and name.isidentifier()


def _select_weights(names: Iterable[str]) -> list[str]:
    """As `Checkpoint.open` reads a folder: its index and the shards, or its files, without other forms of the same."""
    chosen = choose_weights(group_weights(names), None, "")
    found = []
    for group in chosen:
        shards = [name for name in group.files if SHARD_NAME.fullmatch(name.removesuffix(SUFFIX))]
        found += [group.index, *(shards or group.files)] if group.index else group.files
    return found
