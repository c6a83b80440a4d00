"""Run as a process of its own: what a model would be on the devices of this machine. No weight is read and no device
but the CPU is started. One JSON object from stdin, one line of JSON to stdout, whose keys are those of `ModelFacts`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.config import GenerationSettings, MeshSizes, ResidencyConfig
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.registry import find_published, load_family
from comfy_tpu.parallel.chips import find_slice
from comfy_tpu.parallel.layouts import SPARE_FRACTION, estimate
from comfy_tpu.parallel.mesh import abstract_placement, find_chip, make_placement, parse_mesh
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.model_files import ModelFiles, find_local
from comfy_tpu.pipeline.running_model import choose_dtype
from comfy_tpu.pipeline.step_work import count_step


def probe(
    model: str,
    *,
    platform: str | None,
    kind: str,
    device_count: int,
    memory_bytes: int | None,
    ignored_keys: Collection[str] = (),
) -> dict[str, Any]:
    """`platform`, `kind`, `device_count` and `memory_bytes` of the devices; a platform of None: they did not start.
    `ignored_keys`: see `RuntimeConfig.ignored_config_keys`."""
    found: dict[str, Any] = {"name": model, "family": None, "directory": None, "error": None, "incomplete": None}
    found |= {"size": None, "mesh": None, "components": [], "needed_bytes": None, "usable_bytes": None}
    devices = {"platform": platform, "kind": kind, "device_count": device_count, "memory_bytes": memory_bytes}
    try:
        directory = find_local(model)
        if directory is not None:
            _examine_files(found, model, directory, devices, ignored_keys)
        else:
            _examine_published(found, model, devices)
    except (ComfyTpuError, OSError) as error:
        found["error"] = str(error)
    return found


def _examine_files(
    found: dict[str, Any], model: str, directory: Path, devices: Mapping[str, Any], ignored_keys: Collection[str]
) -> None:
    found["directory"] = str(directory)
    try:
        files = ModelFiles.open(directory, name=model, ignored_keys=ignored_keys)
    except ComfyTpuError as error:
        found["incomplete"] = str(error)
        files = ModelFiles.open(directory, name=model, to_run=False, ignored_keys=ignored_keys)
    family = files.family
    found["family"] = family.card.name
    configs = {spec.name: files.config(spec) for spec in family.components}
    _examine_components(found, family, configs, files.defaults, lambda: files.workload(files.defaults), devices)
    for entry in found["components"]:
        weights = files.path(entry["name"]).glob("*.safetensors")
        entry["bytes_on_disk"] = sum(path.stat().st_size for path in weights)
    found["incomplete"] = found["incomplete"] or _find_mismatch(files)


def _find_mismatch(files: ModelFiles) -> str | None:
    """Why the weights of a component are not those that its configuration describes; reads headers only."""
    placement = make_placement("single", platform="cpu")
    for spec in files.family.components:
        try:
            _component(spec, files.config(spec), placement).check(files.checkpoint(spec))
        except ComfyTpuError as error:
            return f"{spec.name}: {error}"
    return None


def _examine_published(found: dict[str, Any], model: str, devices: Mapping[str, Any]) -> None:
    published = find_published(model)
    if published is None:
        found["error"] = f"{model} is not on this machine, and is none of the published models that are known"
        return
    hub_id, card = published
    family, config = load_family(card.name), dict(card.published[hub_id])
    defaults = card.defaults_of(hub_id)
    found["family"] = card.name

    def workload() -> Workload:
        return count_step(family, config, defaults, family.vae.latent_channels({}))

    _examine_components(found, family, {family.transformer.name: config}, defaults, workload, devices)


def _examine_components(
    found: dict[str, Any],
    family: ModelFamily,
    configs: Mapping[str, Mapping[str, Any]],
    settings: GenerationSettings,
    workload: Callable[[], Workload],
    devices: Mapping[str, Any],
) -> None:
    """Fills in what is known of the components that have a configuration."""
    specs = {spec.name: spec for spec in family.components if spec.name in configs}
    found["components"] = [{"name": name, "bytes_on_disk": None, "sharding": None} for name in specs]
    found["size"] = f"{settings.width}x{settings.height}x{settings.num_frames}"
    if devices["platform"] is None:
        return
    chip, count = find_chip(devices["kind"]), devices["device_count"]
    sizes = parse_mesh("auto", count, chip=chip, workload=workload)
    found["mesh"] = str(sizes)
    placement = abstract_placement(sizes, platform=devices["platform"], chip=chip)
    components = {name: _component(spec, configs[name], placement) for name, spec in specs.items()}
    for entry in found["components"]:
        entry["sharding"] = components[entry["name"]].sharding_report.as_dict()
    found |= _memory(components, workload, sizes, chip, count, devices["memory_bytes"])


def _component(spec: ComponentSpec, config: Mapping[str, Any], placement: Placement) -> Component:
    return Component(spec, config, placement, dtype=choose_dtype("auto", placement.platform))


def _memory(
    components: Mapping[str, Component],
    workload: Callable[[], Workload],
    sizes: MeshSizes,
    chip: str,
    count: int,
    memory_bytes: int | None,
) -> dict[str, int | None]:
    """Bytes of one device: on a TPU those of a step by the plan's formulas, elsewhere of the largest component's
    weights, and how many of the device's may be used for that."""
    slice_ = find_slice(chip, count)
    if slice_ is not None:
        needed = estimate(workload(), sizes, slice_).memory.total
        return {"needed_bytes": needed, "usable_bytes": int((1 - SPARE_FRACTION) * slice_.chip.memory_bytes)}
    needed = max(component.sharding_report.total.bytes_per_device for component in components.values())
    usable = None if memory_bytes is None else int(ResidencyConfig().weights_fraction * memory_bytes)
    return {"needed_bytes": needed, "usable_bytes": usable}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    sys.stdout.write("\n" + json.dumps(probe(asked.pop("model"), **asked)) + "\n")
