"""Where a program runs: a device mesh, and what kind of device it is made of."""

from __future__ import annotations

import dataclasses

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from comfy_tpu.config import MeshSizes, Platform


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh with axes dp, sp and tp; abstract when a program is lowered for devices that are not attached."""

    mesh: Mesh | AbstractMesh
    platform: Platform
    chip: str
    """As in the tuning tables: "v5e", "v5p", "v6e", "v7x", "h200", "cpu", or the name the driver gives."""

    @property
    def sizes(self) -> MeshSizes:
        return MeshSizes(**dict(self.mesh.shape))

    def sharding(self, *spec: str | tuple[str, ...] | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))
