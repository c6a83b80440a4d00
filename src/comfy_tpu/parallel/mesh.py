"""Devices by platform, mesh sizes from text, and the placement made of both."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from comfy_tpu.config import MESH_AXES, MeshSizes, Platform
from comfy_tpu.distribution import install_command
from comfy_tpu.errors import MeshError
from comfy_tpu.parallel.chips import find_slice
from comfy_tpu.parallel.host_meshes import arrange_over_networks, check_hosts, group_by_network
from comfy_tpu.parallel.layouts import best_layout
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.parallel.runtime_flags import check_runtime_flags
from comfy_tpu.parallel.tpu_holders import ROOT, describe_use, find_tpu
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.terminal_text import excerpt

logger = logging.getLogger(__name__)

PLATFORMS: tuple[Platform, ...] = get_args(Platform)

NAMED_MESHES = {
    "1": MeshSizes(),
    "single": MeshSizes(),
    # The layout the Wan 2.1 node pack was first published with: two CFG branches, four columns.
    "seed": MeshSizes(dp=2, tp=4),
}

# Written out because jax means to change the default to Explicit, which would put shardings into every traced type.
_AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)

# Longest names first: "tpu v5" is how the driver calls a v5p and is also how a v5e ("tpu v5 lite") begins.
_CHIPS = (
    ("tpu v5 lite", "v5e"),
    ("tpu v5e", "v5e"),
    ("tpu v5p", "v5p"),
    ("tpu v5", "v5p"),
    ("tpu v6 lite", "v6e"),
    ("tpu v6e", "v6e"),
    ("tpu v7x", "v7x"),
    ("tpu7x", "v7x"),
    *((f"nvidia {chip}", chip) for chip in ("h100", "h200", "gh200", "b200", "gb200", "b300", "gb300")),
)

# What a driver calls the chip, and its cores: Pallas asks an abstract mesh for both while lowering without devices.
_ABSTRACT_DEVICES = {
    "v5e": ("TPU v5 lite", 1),
    "v5p": ("TPU v5p", 2),
    "v6e": ("TPU v6 lite", 1),
    "v7x": ("TPU7x", 1),
    "h200": ("NVIDIA H200", None),
}


def find_devices(platform: str = "auto", *, root: Path = ROOT) -> list[jax.Device]:
    """The devices of a platform; with "auto" those of the first of tpu, gpu and cpu that jax can start.

    Raises MeshError rather than take the CPU of a machine that has a TPU, unless JAX_PLATFORMS leaves the TPU out.
    `root`: where /dev, /proc and /sys are looked for.
    """
    check_runtime_flags()
    if platform != "auto":
        _check_platform(platform, ("auto", *PLATFORMS))
        try:
            return jax.devices(platform)
        except RuntimeError as error:
            if platform == "tpu" and (use := describe_use(root, str(error))):
                raise MeshError(f"the TPU cannot be used: {use[0]}; {use[1]}") from error
            raise MeshError(
                f"platform {platform!r} was asked for but jax could not start it ({error}); install its jax plugin "
                f"(`{install_command('cuda' if platform == 'gpu' else 'tpu')}`), look at JAX_PLATFORMS, "
                "or choose platform 'auto'",
                field="platform",
            ) from error
    reasons = []
    # jax starts every platform at the first of these calls and remembers which failed: asking again starts nothing.
    for candidate in PLATFORMS:
        try:
            devices = jax.devices(candidate)
        except RuntimeError as error:
            reasons.append(f"{candidate}: {error}")
            continue
        if candidate == "cpu":
            _check_fallback("; ".join(reasons), root)
            _log_cpu_fallback(len(devices), "; ".join(reasons))
        return devices
    if use := describe_use(root, "; ".join(reasons)):  # with JAX_PLATFORMS=tpu,cpu jax starts none without the first
        raise MeshError(f"the TPU cannot be used: {use[0]}; {use[1]}")
    raise MeshError(f"jax could start none of {', '.join(PLATFORMS)} ({'; '.join(reasons)}); look at JAX_PLATFORMS")


def _check_fallback(reasons: str, root: Path) -> None:
    """A model on the CPU of a TPU machine would run for days, and nobody would know why."""
    requested = requested_platforms()
    if requested and "tpu" not in requested:
        return
    place = find_tpu(root)
    if place is None:
        return
    use = describe_use(root, reasons)
    problem = use[0] if use else f"jax could not start it ({excerpt(reasons)})"
    advice = use[1] if use else "`comfy-tpu doctor` says what to mend"
    raise MeshError(
        f"this machine has a TPU ({place}), but {problem}; {advice}, or ask for the CPU: JAX_PLATFORMS=cpu, or "
        "--platform cpu of the command"
    )


def requested_platforms() -> list[str]:
    """Those that JAX_PLATFORMS or jax.config name, which keeps jax from looking further; none: all."""
    text = getattr(jax.config, "jax_platforms", None)  # an option that its type does not know
    return [name for name in (text or "").split(",") if name]


@functools.cache  # once per process, however many placements are made
def _log_cpu_fallback(count: int, reasons: str) -> None:
    asked_for = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    logger.log(
        logging.INFO if asked_for else logging.WARNING,
        "no TPU or GPU was found: running on %d CPU device(s), which is slow; `comfy-tpu doctor` says why",
        count,
    )
    logger.debug("%s", reasons)


def chip_name(device: jax.Device) -> str:
    """The name a device has in the tuning tables, else what its driver calls it, in lower case."""
    return find_chip(device.device_kind)


def find_chip(kind: str) -> str:
    """The same from what a driver calls the device."""
    kind = kind.lower()
    for prefix, chip in _CHIPS:
        if kind == prefix or kind.startswith(prefix + " "):
            return chip
    return kind


def parse_mesh(
    mesh: str | MeshSizes,
    device_count: int,
    *,
    chip: str = "",
    workload: Callable[[], Workload | Sequence[Workload]] | None = None,
    rows: int = 2,
    slices: int = 1,
) -> MeshSizes:
    """Sizes from "auto", "single" ("1"), "seed", or axes such as "dp=2,sp=4"; an axis that is not named has size 1.

    "auto" is the best layout by estimate where the workload is given and the chip is a known TPU; it is asked for then
    only. Several workloads are a step with different numbers of rows in a call. Elsewhere `rows` decides: the rows of a
    step's batch, two with guidance. `slices`: the number of TPU slices that the devices are in.
    """
    if isinstance(mesh, MeshSizes):
        sizes = mesh
    elif not isinstance(mesh, str):
        raise MeshError(f"mesh is {mesh!r}, expected text such as 'auto' or 'dp=2,sp=4'", field="mesh")
    elif mesh.strip() == "auto":
        sizes = _auto_sizes(device_count, chip, workload, rows, slices)
    elif mesh.strip() in NAMED_MESHES:
        sizes = NAMED_MESHES[mesh.strip()]
    else:
        sizes = _parse_axes(mesh)
    for axis in MESH_AXES:
        _check_size(f"mesh {sizes}", axis, getattr(sizes, axis))
    if sizes.device_count > device_count:
        raise MeshError(
            f"mesh {sizes} needs {sizes.device_count} devices but there are {device_count}; "
            f"choose sizes whose product is at most {device_count}",
            field="mesh",
        )
    return sizes


def check_mesh_text(text: str) -> None:
    """Raises MeshError for text that is no mesh on any number of devices. No device is started."""
    parse_mesh(text, sys.maxsize)


def _auto_sizes(
    device_count: int, chip: str, workload: Callable[[], Workload | Sequence[Workload]] | None, rows: int, slices: int
) -> MeshSizes:
    slice_ = find_slice(chip, device_count, slices)
    if workload is not None and slice_ is not None and device_count > 1:
        given = workload()
        _, best = best_layout((given,) if isinstance(given, Workload) else given, slice_, device_count)
        logger.info("mesh auto: %s, about %.2f s a step", best.sizes, best.step_seconds)
        return best.sizes
    # A fixed preference that suits video: the two CFG branches, or two videos, never talk to each other, and the
    # sequence is the longest dimension.
    if device_count % 2 == 0 and rows % 2 == 0:
        return MeshSizes(dp=2, sp=device_count // 2)
    return MeshSizes(sp=device_count)


def _parse_axes(text: str) -> MeshSizes:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\S+)\s*", part)
        if match is None:
            raise MeshError(
                f"mesh {text!r}: {part.strip()!r} is not of the form axis=size; write axes such as 'dp=2,sp=4', "
                f"or one of {', '.join(('auto', *NAMED_MESHES))}",
                field="mesh",
            )
        axis, size = match.groups()
        if axis not in MESH_AXES:
            raise MeshError(
                f"mesh {text!r}: unknown axis {axis!r}; choose axes from {', '.join(MESH_AXES)}", field="mesh"
            )
        if axis in sizes:
            raise MeshError(f"mesh {text!r}: axis {axis!r} is given twice; give each axis once", field="mesh")
        try:
            sizes[axis] = int(size)
        except ValueError:
            raise MeshError(
                f"mesh {text!r}: {axis}={size} is not a whole number; sizes start at 1", field="mesh"
            ) from None
        _check_size(f"mesh {text!r}", axis, sizes[axis])
    return MeshSizes(**sizes)


def _check_size(where: str, axis: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise MeshError(f"{where}: {axis}={size!r} is not a size; sizes are whole numbers from 1", field="mesh")


def check_heads(heads: int, tp: int) -> None:
    """Attention divides its heads among tp; a single head is not divided."""
    if heads > 1 and heads % tp:
        raise MeshError(f"heads={heads} is not divisible by tp={tp}; choose tp from {divisors(heads)}")


def divisors(number: int) -> str:
    return ", ".join(str(candidate) for candidate in range(1, number + 1) if number % candidate == 0)


def _check_platform(platform: str, choices: Sequence[str]) -> None:
    if platform not in choices:
        raise MeshError(f"platform={platform!r} is unknown; choose from {', '.join(choices)}", field="platform")


def make_placement(
    mesh: str | MeshSizes = "auto",
    *,
    platform: str = "auto",
    devices: Sequence[jax.Device] | None = None,
    workload: Callable[[], Workload | Sequence[Workload]] | None = None,
    rows: int = 2,
) -> Placement:
    """A mesh over the given devices, or over those of a platform; "auto" ranks layouts for the workload, or goes by the
    rows of a step's batch."""
    if devices is None:
        devices = find_devices(platform)
    found = sorted({device.platform for device in devices})
    if len(found) != 1 or platform not in ("auto", found[0]):
        raise MeshError(
            f"{len(devices)} devices of platform {' and '.join(found) or 'none'} were given, expected at least one, "
            f"all of {'one platform' if platform == 'auto' else repr(platform)}; pass devices of one platform"
        )
    _check_platform(found[0], PLATFORMS)
    slices = len(group_by_network(devices)) if found[0] == "tpu" else 1
    sizes = parse_mesh(mesh, len(devices), chip=chip_name(devices[0]), workload=workload, rows=rows, slices=slices)
    check_hosts(sizes, devices)
    if sizes.device_count < len(devices):
        logger.info("mesh %s uses the first %d of %d devices", sizes, sizes.device_count, len(devices))
    used = list(devices)[: sizes.device_count]
    arranged = arrange_over_networks(sizes, used, arrange_devices)
    jax_mesh = Mesh(arranged, MESH_AXES, axis_types=_AXIS_TYPES)
    return Placement(mesh=jax_mesh, platform=used[0].platform, chip=chip_name(used[0]))


def arrange_devices(sizes: MeshSizes, devices: Sequence[Any]) -> np.ndarray:
    """Devices as an array of the mesh's shape, neighbours on an axis being neighbours on the interconnect."""
    shape = (sizes.dp, sizes.sp, sizes.tp)
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError, AssertionError) as error:
        # A part of a TPU slice need not be a box. Slower collectives are better than no run.
        logger.warning("mesh %s: devices stay in the driver's order, collectives may be slower (%s)", sizes, error)
        return np.array(devices, dtype=object).reshape(shape)


def abstract_placement(sizes: MeshSizes, *, platform: Platform, chip: str) -> Placement:
    """A placement without devices, to trace and lower for a machine that is not attached."""
    _check_platform(platform, PLATFORMS)
    parse_mesh(sizes, sizes.device_count)
    device = None if platform == "cpu" else _abstract_device(platform, chip)
    shape = (sizes.dp, sizes.sp, sizes.tp)
    mesh = AbstractMesh(shape, MESH_AXES, axis_types=_AXIS_TYPES, abstract_device=device)
    return Placement(mesh=mesh, platform=platform, chip=chip)


def _abstract_device(platform: Platform, chip: str) -> AbstractDevice:
    kind, cores = _ABSTRACT_DEVICES.get(chip, (chip, None))
    facts: dict[str, Any] = {"device_kind": kind, "num_cores": cores, "platform": platform}
    # jax 0.10.0 has no platform field yet.
    known = {field.name for field in dataclasses.fields(AbstractDevice)}
    return AbstractDevice(**{name: value for name, value in facts.items() if name in known})
