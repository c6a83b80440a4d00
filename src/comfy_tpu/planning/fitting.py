"""Whether a model fits on the devices of a machine or a slice, by the formulas of `comfy-tpu plan`."""

from __future__ import annotations

import dataclasses

from comfy_tpu.compiler.stored import open_store
from comfy_tpu.config import CacheConfig, GenerationSettings
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.parallel.chips import CHIPS, Slice, find_slice
from comfy_tpu.parallel.layouts import rank_layouts, usable_bytes
from comfy_tpu.pipeline.step_work import count_step
from comfy_tpu.planning.models import PlannedModel

_FLOAT32_FACTOR = 2
"""On a CPU models run in float32; the formulas count bfloat16."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices that run one model."""

    name: str
    slice_: Slice
    """The TPU slice, or one device of a TPU with the memory of another kind of device."""
    platform: str = "tpu"

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.slice_.chip)


@dataclasses.dataclass(frozen=True)
class Fit:
    needed_bytes: int
    """On each device: the transformer's weights and a step's temporaries, or another component where that is more."""
    usable_bytes: int
    mesh: str

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes


def find_machine() -> Machine:
    """The devices of this machine. Starts them."""
    from comfy_tpu.parallel.mesh import chip_name, find_devices

    devices = find_devices()
    device, count = devices[0], len(devices)
    slice_ = find_slice(chip_name(device), count) if device.platform == "tpu" else None
    if slice_ is not None:
        return Machine(slice_.name, slice_)
    memory = (device.memory_stats() or {}).get("bytes_limit") or _host_bytes() // count
    # The formulas were fitted on v6e; products and links, in which chips differ, are not asked for here.
    chip = dataclasses.replace(CHIPS["v6e"], name=device.device_kind, memory_bytes=int(memory))
    return Machine(f"{count} × {device.device_kind}", Slice(chip, count), device.platform)


def _host_bytes() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def find_fit(model: PlannedModel, settings: GenerationSettings, machine: Machine, others: int = 0) -> Fit | None:
    """None for a model that the formulas do not know. `others`: bytes of the largest component besides the transformer,
    in bfloat16."""
    try:
        work = count_step(model.family, model.config, settings, model.latent_channels, open_store(CacheConfig()))
        best = rank_layouts(work, machine.slice_)[0]
    except (ComfyTpuError, IndexError):
        return None
    needed = max(best.memory.total, others // machine.slice_.device_count)
    factor = _FLOAT32_FACTOR if machine.platform == "cpu" else 1
    return Fit(factor * needed, machine.usable_bytes, str(best.sizes))
