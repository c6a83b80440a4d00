"""comfy-tpu models: what is known, what is on this machine, and what fits on it.

Reads cards and files; torch and jax are imported for --fits alone. With --json, one object on stdout. Its keys stay;
new ones may be added:

    schema        1
    cache         the hub's cache: directory, free_bytes of its disk
    machine       with --fits: name and usable_bytes of each device, else null
    models        name (a hub id, demo, or a directory), family, kind, tasks, images and videos that it takes (a
                  sentence, or ""), licence, download_bytes, local (directory, nbytes, is_complete; or null),
                  fits_on_disk (what is missing, by the rule of `download`; null where the size is not known), size,
                  frames, steps, presets (settings by name), and with --fits fits (needed_bytes of each device, fits,
                  mesh; or null where it cannot be said)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_tpu.cli.options import path_parser
from comfy_tpu.cli.terminal import print_message, print_text
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import ImageInput, ModelCard, VideoInput
from comfy_tpu.families.presets import describe_settings
from comfy_tpu.hub.disk import find_disk, has_room
from comfy_tpu.hub.inventory import TASKS, KnownModel, list_models
from comfy_tpu.hub.sizes import format_bytes, read_parameters

if TYPE_CHECKING:
    from comfy_tpu.planning.fitting import Fit, Machine

HERE = "here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", metavar="WORD", nargs="*", help="only models that have all of these in their names")
    parser.add_argument("--task", metavar="TASK", help=f"only models for it: {', '.join(TASKS)}")
    parser.add_argument("--downloaded", action="store_true", help="only models that are on this machine")
    parser.add_argument(
        "--directory",
        action="append",
        default=[],
        type=path_parser("--directory"),
        metavar="DIR",
        help="a folder of model directories, besides ./models and ComfyUI's models/diffusers; may be repeated",
    )
    parser.add_argument(
        "--fits",
        nargs="?",
        const=HERE,
        metavar="SLICE",
        help="also say what fits on this machine, or on a TPU slice such as v6e-8, by the formulas of `plan`; takes "
        "seconds for each model",
    )
    parser.add_argument("--presets", action="store_true", help="also show the settings of each preset")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.diagnosis.facts import model_cache_directory

    _check(arguments)
    cache = model_cache_directory()
    named = [model for model in list_models(cache, arguments.directory) if _is_named(model, arguments.words)]
    if not named:
        raise InvalidValueError(
            f"no model has {' and '.join(map(repr, arguments.words))} in its name; `comfy-tpu models` lists all",
            field="words",
        )
    models = [model for model in named if _is_wanted(model, arguments)]
    machine, fits = _find_fits(arguments.fits, models) if arguments.fits else (None, {})
    free = find_disk(cache).free_bytes
    if arguments.json:
        print(json.dumps(_document(models, cache, free, machine, fits), indent=2))
        return 0
    print_text("\n".join([*_table(models, free, machine, fits), "", *_notes(cache, machine)]))
    if arguments.presets:
        print_text("\n".join(["", *_preset_lines(models)]))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.task is not None and arguments.task not in TASKS:
        raise InvalidValueError(f"task={arguments.task} is unknown; choose from {', '.join(TASKS)}", field="task")
    for directory in arguments.directory:
        if not directory.is_dir():
            raise InvalidValueError(f"directory={directory} is not a directory; give one", field="directory")


def _is_named(model: KnownModel, words: Sequence[str]) -> bool:
    names = " ".join((model.name, model.family, model.card.name)).lower()
    return all(word.lower() in names for word in words)


def _is_wanted(model: KnownModel, arguments: argparse.Namespace) -> bool:
    is_for_it = arguments.task is None or arguments.task in model.tasks
    return is_for_it and (not arguments.downloaded or (model.local is not None and model.local.is_complete))


def _find_fits(where: str, models: Sequence[KnownModel]) -> tuple[Machine, dict[str, Fit | None]]:
    from comfy_tpu.parallel.chips import parse_slice
    from comfy_tpu.planning.fitting import Machine, find_fit, find_machine
    from comfy_tpu.planning.models import find_model

    machine = find_machine() if where == HERE else Machine(where, parse_slice(where))
    found: dict[str, Fit | None] = {}
    for model in models:
        print_message(f"counting {model.name}")
        planned = find_model(_plannable_name(model))
        others = [count for name, count in read_parameters().get(model.name, {}).items() if "transformer" not in name]
        found[model.name] = find_fit(planned, planned.defaults, machine, 2 * max(others, default=0))
    return machine, found


def _plannable_name(model: KnownModel) -> str:
    """The name of a published or a demo model; of others, the directory."""
    is_known = model.local is None or model.name in model.card.published
    return model.name if is_known or model.local is None else str(model.local.directory)


def _document(
    models: Sequence[KnownModel],
    cache: Path,
    free: int,
    machine: Machine | None,
    fits: Mapping[str, Fit | None],
) -> dict[str, Any]:
    return {
        "schema": 1,
        "cache": {"directory": str(cache), "free_bytes": free},
        "machine": machine and {"name": machine.name, "usable_bytes": machine.usable_bytes},
        "models": [_describe(model, free, machine, fits) for model in models],
    }


def _describe(model: KnownModel, free: int, machine: Machine | None, fits: Mapping[str, Fit | None]) -> dict[str, Any]:
    own, local, fit = model.card.defaults_of(model.name), model.local, fits.get(model.name)
    described: dict[str, Any] = {
        "name": model.name,
        "family": model.family,
        "kind": model.card.name,
        "tasks": list(model.tasks),
        "images": _images(model.card),
        "videos": _videos(model.card),
        "licence": model.licence,
        "download_bytes": model.download_bytes,
        "local": local
        and {"directory": str(local.directory), "nbytes": local.nbytes, "is_complete": local.is_complete},
        "fits_on_disk": _fits_on_disk(model, free),
        "size": [own.width, own.height],
        "frames": own.num_frames,
        "steps": own.num_inference_steps,
        "presets": {name: dict(preset.settings) for name, preset in model.presets.items()},
    }
    if machine is not None:
        described["fits"] = fit and {"needed_bytes": fit.needed_bytes, "fits": fit.fits, "mesh": fit.mesh}
    return described


def _fits_on_disk(model: KnownModel, free: int) -> bool | None:
    if model.local is not None and model.local.is_complete:
        return True
    if model.download_bytes is None:
        return None
    here = 0 if model.local is None else model.local.nbytes
    return has_room(free, model.download_bytes - here)


def _table(
    models: Sequence[KnownModel], free: int, machine: Machine | None, fits: Mapping[str, Fit | None]
) -> list[str]:
    columns: dict[str, Callable[[KnownModel], str]] = {
        "model": lambda model: model.name,
        "kind": lambda model: model.card.name,
        "download": lambda model: _download_text(model, free),
        "here": lambda model: _local_text(model),
        "licence": lambda model: model.licence or "?",
        "images": lambda model: _images(model.card) or "—",
        "videos": lambda model: _videos(model.card) or "—",
        "presets": lambda model: ", ".join(model.presets) or "—",
    }
    if machine is not None:
        columns["fits"] = lambda model: _fit_text(fits.get(model.name))
    rows = [list(columns), *([cell(model) for cell in columns.values()] for model in models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _download_text(model: KnownModel, free: int) -> str:
    if model.download_bytes is None:
        return "?"
    if not model.download_bytes:
        return "—"
    size = format_bytes(model.download_bytes)
    return size if _fits_on_disk(model, free) else f"{size} !"


def _local_text(model: KnownModel) -> str:
    if model.local is None:
        return "—"
    size = format_bytes(model.local.nbytes)
    return size if model.local.is_complete else f"{size}, not all"


def _images(card: ModelCard) -> str:
    taken = [] if card.image is None else [_image(card.image)]
    if card.max_references:
        taken.append(f"up to {card.max_references} references")
    return "; ".join(taken)


def _image(image: ImageInput) -> str:
    if image.role == "initial":
        return "to start from" if image.required else "to start from, optional"
    if image.role == "reference":
        fewest = "1 to" if image.required else "up to"
        return "one reference" if image.max_images == 1 else f"{fewest} {image.max_images} references"
    last = {"no": "", "optional": ", last optional", "required": " and last frame"}[image.last_image]
    first = "first" if image.last_image == "required" else "first frame"
    if image.last_image == "optional" and not image.required:
        return "first and last frame, both optional"
    return f"{first}{last}" if image.required else f"{first}{last}, optional"


def _videos(card: ModelCard) -> str:
    needed = " and ".join(_video(video) for video in card.videos if video.required)
    optional = " and ".join(_video(video) for video in card.videos if not video.required)
    return "; ".join([*([needed] if needed else []), *([f"{optional}, optional"] if optional else [])])


def _video(video: VideoInput) -> str:
    if video.role == "initial":
        return "to start from"
    return "control video" if video.role == "control" and video.name == "video" else video.name.replace("_", " ")


def _fit_text(fit: Fit | None) -> str:
    if fit is None:
        return "?"
    size = f"{format_bytes(fit.needed_bytes)} of {format_bytes(fit.usable_bytes)}"
    return f"yes, {size}" if fit.fits else f"no, {size}"


def _notes(cache: Path, machine: Machine | None) -> list[str]:
    disk = find_disk(cache)
    lines = [
        f"Downloads go to {cache}; its disk {disk} has {format_bytes(disk.free_bytes)} free (!: too little). HF_HOME "
        "chooses another.",
        "`comfy-tpu download MODEL` fetches one. `--preset NAME` is for a LoRA or a model that was distilled for it.",
    ]
    if machine is not None:
        lines.append(f"fits: each device of {machine.name}, at the model's own size, by the formulas of `plan`.")
    return lines


def _preset_lines(models: Sequence[KnownModel]) -> list[str]:
    """Those of a kind once, by the name of the kind; those that a model directory brings by the model's own name."""
    by_owner = {
        model.card.name if model.presets is model.card.presets else model.name: model.presets for model in models
    }
    lines = []
    for whose, presets in by_owner.items():
        for name, preset in presets.items():
            sources = f" ({', '.join(preset.sources)})" if preset.sources else ""
            lines.append(f"{whose}, {name}: {describe_settings(preset.settings)}{sources}")
    return lines
