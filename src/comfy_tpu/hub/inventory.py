"""The models that are known, and those that are on this machine: by cards and files, without torch and jax."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from comfy_tpu.compiler.weight_names import choose_weights, group_weights
from comfy_tpu.config import DEMO_IMAGE_MODEL, DEMO_MODEL
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.families.card import SCHEDULER_FILE, FamilyCard, ModelCard, Preset
from comfy_tpu.families.registry import family_cards, find_family_card, find_model_card
from comfy_tpu.hub.selection import INDEX, read_components
from comfy_tpu.hub.sizes import download_bytes
from comfy_tpu.json_input import read_json

DEMO_DIRECTORY = Path(__file__).parents[1] / "assets" / "demo"
_DEMO_MODELS = {DEMO_MODEL: DEMO_DIRECTORY, DEMO_IMAGE_MODEL: DEMO_DIRECTORY / "image_to_video"}
_LOCAL_FOLDERS = ("models", "ComfyUI/models/diffusers", "~/ComfyUI/models/diffusers")
"""Where people keep model directories, besides the hub's cache."""
_WITHOUT_WEIGHTS = ("tokenizer", "scheduler", "processor", "feature_extractor", "guider")


@dataclasses.dataclass(frozen=True)
class LocalCopy:
    """The files of a model on this machine."""

    directory: Path
    nbytes: int
    is_complete: bool
    """Whether every component has its weights."""


@dataclasses.dataclass(frozen=True)
class KnownModel:
    name: str
    """A hub id, "demo", or the path of a directory."""
    family: str
    card: ModelCard
    presets: Mapping[str, Preset]
    download_bytes: int | None = None
    """None: not known, because it is no published model of a family."""
    licence: str = ""
    """Empty: not known."""
    local: LocalCopy | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        made = "image" if self.card.makes_images else "video"
        image = self.card.image
        needs_more = any(given.required for given in (image, *self.card.videos) if given is not None)
        changes_video = any(video.role in ("initial", "control") for video in self.card.videos)
        return (
            *(() if needs_more else (f"text-to-{made}",)),
            *(() if image is None else (f"image-to-{made}",)),
            *(("video-to-video",) if changes_video else ()),
        )


TASKS = ("text-to-video", "image-to-video", "video-to-video", "text-to-image", "image-to-image")


def list_models(cache: Path, folders: Iterable[Path] = (), environ: Mapping[str, str] = os.environ) -> list[KnownModel]:
    """The demo models, the published ones, and others that are in the hub's cache or in a folder of model directories.

    `folders`: looked into besides the usual ones.
    """
    published = [_published(family, card, hub_id, cache) for family, card, hub_id in _published_cards()]
    ids = {model.name for model in published}
    others = [model for model in _scan_cache(cache) if model.name not in ids]
    local = {path: model for folder in _folders(folders, environ) for path, model in _scan_folder(folder)}
    return [*_demo_models(), *published, *others, *local.values()]


def _published_cards() -> Iterator[tuple[FamilyCard, ModelCard, str]]:
    return ((family, card, hub_id) for family in family_cards() for card in family.models for hub_id in card.published)


def _published(family: FamilyCard, card: ModelCard, hub_id: str, cache: Path) -> KnownModel:
    local = _find_cached(cache / f"models--{hub_id.replace('/', '--')}")
    licence = card.licences.get(hub_id, "")
    return KnownModel(hub_id, family.title, card, card.presets, download_bytes(hub_id), licence, local)


def _demo_models() -> Iterator[KnownModel]:
    for name, directory in _DEMO_MODELS.items():
        if (model := _read_directory(name, directory)) is not None:
            yield dataclasses.replace(model, licence="MIT", download_bytes=0)


def _scan_cache(cache: Path) -> Iterator[KnownModel]:
    for root in sorted(cache.glob("models--*--*")):
        local = _find_cached(root)
        if local is not None:
            name = root.name.removeprefix("models--").replace("--", "/", 1)
            model = _read_directory(name, local.directory)
            if model is not None:
                yield dataclasses.replace(model, local=local)


def _find_cached(root: Path) -> LocalCopy | None:
    """The copy of the hub's cache: the snapshot of `main`, else the newest one."""
    snapshots = sorted((root / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
    if not snapshots:
        return None
    named = _read_main(root / "refs" / "main")
    snapshot = next((path for path in snapshots if path.name == named and path.is_dir()), snapshots[-1])
    nbytes = sum(path.stat().st_size for path in (root / "blobs").glob("*") if path.is_file())
    return LocalCopy(snapshot, nbytes, _is_complete(snapshot))


def _read_main(path: Path) -> str:
    """The name of the snapshot of `main`; "" where the file is missing or damaged."""
    try:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _folders(given: Iterable[Path], environ: Mapping[str, str]) -> list[Path]:
    usual = [Path(folder).expanduser() for folder in _LOCAL_FOLDERS]
    if comfyui := environ.get("COMFYUI_PATH"):
        usual.append(Path(comfyui) / "models" / "diffusers")
    return list(dict.fromkeys(path.resolve() for path in (*given, *usual) if path.is_dir()))


def _scan_folder(folder: Path) -> Iterator[tuple[Path, KnownModel]]:
    """Model directories in a folder, or in folders of it: models/diffusers/OWNER/NAME. Or the folder itself."""
    for pattern in (INDEX, f"*/{INDEX}", f"*/*/{INDEX}"):
        for index in sorted(folder.glob(pattern)):
            if (model := _read_directory(str(index.parent), index.parent)) is not None:
                yield index.parent, model


def _read_directory(name: str, directory: Path) -> KnownModel | None:
    """A model of a known family; None for anything else."""
    try:
        index = read_json(directory / INDEX)
        described = (directory / "transformer" / "config.json", directory / SCHEDULER_FILE)
        card = find_model_card(index, *(read_json(path) if path.is_file() else {} for path in described))
    except (ComfyTpuError, OSError, ValueError, AttributeError):
        return None
    nbytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    local = LocalCopy(directory, nbytes, _is_complete(directory))
    return KnownModel(name, find_family_card(card).title, card, _read_presets(directory, card), local=local)


def _read_presets(directory: Path, card: ModelCard) -> Mapping[str, Preset]:
    own = directory / "presets.json"
    if not own.is_file():
        return card.presets
    try:
        return {
            name: Preset(dict(value["settings"]), lora=value.get("lora", "")) for name, value in read_json(own).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_complete(directory: Path) -> bool:
    """Whether all components are there, those with weights with all of their files."""
    try:
        components = read_components(read_json(directory / INDEX), str(directory))
        shared = directory / "shared_parts.json"
        elsewhere = read_json(shared)["from_parent"] if shared.is_file() else []
        return all(_has_component(directory, name) for name in components if name not in elsewhere)
    except (ComfyTpuError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _has_component(directory: Path, name: str) -> bool:
    folder = directory / name
    if any(word in name for word in _WITHOUT_WEIGHTS):
        return folder.is_dir()
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    groups = choose_weights(group_weights(names), None, str(folder))
    index = next((group.index for group in groups if group.index), None)
    if index is None:
        return bool(groups)
    return set(read_json(folder / index)["weight_map"].values()) <= set(names)
