"""Meshes over several hosts: dp goes over the slower network, sp and tp stay where links are fast."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from comfy_tpu.config import MESH_AXES, MeshSizes
from comfy_tpu.errors import MeshError, join_names

logger = logging.getLogger(__name__)

Arrange = Callable[[MeshSizes, Sequence[Any]], np.ndarray]
"""(sizes, devices of one fast network) -> the devices in the mesh's shape."""


def group_by_network(devices: Sequence[Any]) -> list[list[Any]]:
    """Devices by the fast network that joins them: a TPU slice, whose links go from host to host, elsewhere a host."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        is_tpu = device.platform == "tpu"
        key = getattr(device, "slice_index", 0) if is_tpu else device.process_index
        groups.setdefault(key, []).append(device)
    return [groups[key] for key in sorted(groups)]


def check_hosts(sizes: MeshSizes, devices: Sequence[Any]) -> None:
    """Raises MeshError where a mesh leaves devices of several hosts idle: every process must hold a part of it."""
    hosts = {device.process_index for device in devices}
    if len(hosts) > 1 and sizes.device_count != len(devices):
        raise MeshError(
            f"mesh {sizes} has {sizes.device_count} devices, but {len(hosts)} hosts have {len(devices)}, and each of "
            f"them must have its part; choose sizes whose product is {len(devices)}, or start fewer processes",
            field="mesh",
        )


def arrange_over_networks(sizes: MeshSizes, devices: Sequence[Any], arrange: Arrange) -> np.ndarray:
    """Devices as an array of the mesh's shape. dp divides the networks where it can; where it cannot, sp or tp cross
    from one to the next, with a warning."""
    groups = group_by_network(devices)
    if len(groups) == 1:
        return arrange(sizes, devices)
    if sizes.dp % len(groups) == 0 and len({len(group) for group in groups}) == 1:
        own = MeshSizes(dp=sizes.dp // len(groups), sp=sizes.sp, tp=sizes.tp)
        return np.concatenate([arrange(own, group) for group in groups])
    # In the order of the networks, so that few neighbours are in two of them.
    ordered = np.empty(len(devices), dtype=object)
    ordered[:] = [device for group in groups for device in group]
    mesh = ordered.reshape(sizes.dp, sizes.sp, sizes.tp)
    if axes := crossing_axes(mesh):
        kind = "TPU slices" if devices[0].platform == "tpu" else "hosts"
        logger.warning(
            "mesh %s: %s crosses the network between %d %s, which is slower than the links inside one; a mesh with "
            "sp×tp of at most %d keeps to them",
            sizes,
            join_names(axes, separator=" and "),
            len(groups),
            kind,
            min(map(len, groups)),
            extra={"field": "mesh"},
        )
    return mesh


def crossing_axes(mesh: np.ndarray) -> tuple[str, ...]:
    """The axes among sp and tp on which two neighbours are in different networks."""
    groups = group_by_network(list(mesh.flat))
    number = {id(device): index for index, group in enumerate(groups) for device in group}
    networks = np.vectorize(lambda device: number[id(device)], otypes=[int])(mesh)
    return tuple(
        axis
        for dimension, axis in enumerate(MESH_AXES)
        if axis != "dp" and (np.diff(networks, axis=dimension) != 0).any()
    )
