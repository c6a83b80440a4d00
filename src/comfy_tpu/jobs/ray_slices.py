"""TPU slices of several hosts in a Ray cluster: one actor a host, placed and started together."""

from __future__ import annotations

import contextlib
from typing import Any

from comfy_tpu.errors import InvalidValueError, MeshError
from comfy_tpu.jobs.ray_cluster import WORKER_LABEL
from comfy_tpu.parallel.chips import Slice, parse_slice

_RESERVE_SECONDS = 5.0
"""For a slice whose hosts are all there and free; Ray would have the driver wait for 100 s."""
_RAY_NAMES = {"v5e": "v5litepod"}


def parse_slice_name(text: str) -> Slice:
    """Raises InvalidValueError for what is no slice, or one that Ray does not place."""
    try:
        slice_ = parse_slice(text)
    except MeshError as error:
        raise InvalidValueError(str(error).replace("tpu=", "slice=", 1), field="slice") from error
    return slice_


class SlicePlacement:
    """A reserved slice. It is free again after `release`, or at the driver's end."""

    def __init__(self, slice_: Slice) -> None:
        """Raises TimeoutError where no such slice is free."""
        from ray.util.tpu import slice_placement_group

        version = _RAY_NAMES.get(slice_.chip.name, slice_.chip.name)
        try:
            self._group = slice_placement_group(
                topology=slice_.topology,
                accelerator_version=version,
                strategy="STRICT_SPREAD",
                head_reservation_timeout_s=_RESERVE_SECONDS,
            )
        except ValueError as error:
            raise InvalidValueError(f"slice={slice_.name} cannot be placed by Ray ({error})", field="slice") from error

    def options(self) -> list[dict[str, Any]]:
        """How the actor of each host is started."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return [
            {
                "num_cpus": 0,
                "resources": {"TPU": self._group.devices_per_host},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=self._group.placement_group, placement_group_bundle_index=index
                ),
            }
            for index in range(self._group.num_bundles)
        ]

    def release(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._group.shutdown()


def worker_number(node: dict[str, Any]) -> int:
    """The number of a host in its slice, by which libtpu counts processes."""
    return int(node.get("Labels", {}).get(WORKER_LABEL, 0))
