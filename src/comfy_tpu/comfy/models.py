"""The models that a node offers, and their pipelines, which live as long as the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths

from comfy_tpu.comfy.first_import import import_jax
from comfy_tpu.config import DEMO_IMAGE_MODEL, DEMO_MODEL, RunOptions, RuntimeConfig, SingleFiles
from comfy_tpu.errors import InvalidValueError, join_names
from comfy_tpu.families.card import NodeSet
from comfy_tpu.families.registry import family_cards
from comfy_tpu.hub.download import check_allowed
from comfy_tpu.json_input import read_json

if TYPE_CHECKING:
    from comfy_tpu.pipeline.video import VideoPipeline

_FOLDER = "diffusers"
_DEPTH = 2
"""The depth of model directories: models/diffusers/NAME, or models/diffusers/OWNER/NAME as on the hub."""

_DEMO_MODELS = (DEMO_MODEL, DEMO_IMAGE_MODEL)
_Stamp = tuple[tuple[str, int, int], ...]
_pipelines: dict[tuple[str | SingleFiles, RuntimeConfig], tuple[_Stamp, VideoPipeline]] = {}
_lock = threading.Lock()


def model_choices(family: NodeSet) -> list[str]:
    """Hub models, the demo models, and every directory of the family that ComfyUI's model folders hold."""
    return [*family.model_ids, *(name for name in sorted(_local_models(family)) if name not in family.model_ids)]


def all_model_choices() -> list[str]:
    """`model_choices` of all families."""
    sets = (nodes for card in family_cards() for nodes in card.node_sets)
    return list(dict.fromkeys(name for nodes in sets for name in model_choices(nodes)))


def local_directory(name: str) -> str:
    """The directory of a choice in ComfyUI's model folders; the name itself where there is none."""
    sets = (nodes for card in family_cards() for nodes in card.node_sets)
    return next((str(found[name]) for found in map(_local_models, sets) if name in found), name)


def check_single_files(files: SingleFiles) -> None:
    """Raises where the files are no model. Reads headers and configurations; may download tokenizers."""
    import_jax()
    from comfy_tpu.pipeline.single_files import open_model

    open_model(files)


def _open_single_files(files: SingleFiles, family: NodeSet, runtime: RuntimeConfig) -> VideoPipeline:
    from comfy_tpu.pipeline.video import VideoPipeline

    stamp = _stamp_files((*files.paths, *_own_files(runtime)))
    with _lock:
        known = _pipelines.get((files, runtime))
        if known is None or known[0] != stamp:
            _pipelines[files, runtime] = stamp, VideoPipeline.open(files, runtime)
        opened = _pipelines[files, runtime][1]
    if opened.family.name not in (model.name for model in family.models):
        raise InvalidValueError(
            f"pipeline is a {opened.family.name} model, and this is a node of {family.name}; use the nodes of the "
            "model's own family",
            field="pipeline",
        )
    return opened


def open_pipeline(
    model_id: str | SingleFiles,
    family: NodeSet,
    on_fetch: Callable[[], None],
    options: RunOptions,
) -> VideoPipeline:
    """The pipeline of a model with the runtime of the options; the same object until the model's files change, so that
    nothing is loaded or compiled twice. The weights of all pipelines share the devices' memory, least recently used out
    first.

    `on_fetch` is called before a download, which can take an hour, and which the options allow or not.
    """
    import_jax()
    from comfy_tpu.pipeline.video import VideoPipeline

    runtime = options.runtime
    if isinstance(model_id, SingleFiles):
        return _open_single_files(model_id, family, runtime)
    local = _local_models(family)
    if model_id not in (*family.model_ids, *local):
        raise InvalidValueError(
            f"model_id={model_id!r} is not a {family.name} model that is known here; choose from "
            f"{join_names(model_choices(family))}, or put a model in diffusers' layout into ComfyUI's models/diffusers",
            field="model_id",
        )
    place = local.get(model_id)
    stamp = (_stamp(place) if place else ()) + _stamp_files(_own_files(runtime))
    with _lock:
        known = _pipelines.get((model_id, runtime))
        if known is None or known[0] != stamp:
            if place is None and model_id not in _DEMO_MODELS:
                if not options.allow_download:
                    check_allowed(model_id, field="model_id")
                on_fetch()
            _pipelines[model_id, runtime] = stamp, VideoPipeline.open(place or model_id, runtime, name=model_id)
        return _pipelines[model_id, runtime][1]


def local_fingerprint(model_id: str, family: NodeSet) -> str | None:
    """The fingerprint of a directory in ComfyUI's model folders; None where there is none of this name."""
    place = _local_models(family).get(model_id)
    if place is None or not any(place.glob("*/*.safetensors")):
        return None
    import_jax()
    from comfy_tpu.pipeline.model_files import ModelFiles

    return ModelFiles.open(str(place)).fingerprint


def _local_models(family: NodeSet) -> dict[str, Path]:
    models: dict[str, Path] = {}
    for root in folder_paths.get_folder_paths(_FOLDER):
        for directory in _directories(Path(root), _DEPTH):
            if family.accepts(_model_index(directory)):
                models.setdefault(directory.relative_to(root).as_posix(), directory)
    return {name: path for name, path in models.items() if name not in _DEMO_MODELS}


def _directories(root: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:  # not there, or not ours to read
        return
    for directory in inside:
        yield directory
        if depth > 1:
            yield from _directories(directory, depth - 1)


def _model_index(directory: Path) -> dict[str, Any]:
    try:
        index = read_json(directory / "model_index.json")
    except (OSError, ValueError):  # one odd file must not take every node along
        return {}
    return index if isinstance(index, dict) else {}


def _stamp(directory: Path) -> _Stamp:
    """Names, sizes and modification times of a model's files, which change when a file is replaced."""
    found = (*directory.glob("*"), *directory.glob("*/*"))
    return _stamp_files(sorted(path for path in found if path.is_file()))


def _own_files(runtime: RuntimeConfig) -> tuple[Path, ...]:
    """The files of a runtime that are read with a model."""
    return () if runtime.tiny_vae is None else (runtime.tiny_vae,)


def _stamp_files(files: Iterable[Path]) -> _Stamp:
    return tuple((path.as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
