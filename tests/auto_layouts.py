"""Which layouts `--mesh auto` can take."""

import dataclasses
from collections.abc import Iterator

from comfy_tpu.config import MeshSizes
from comfy_tpu.families.registry import model_cards
from comfy_tpu.parallel.chips import CHIPS, find_slice
from comfy_tpu.parallel.mesh import parse_mesh
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORIES, ModelFiles
from tests.counted_work import published_work

TPU_COUNTS = (1, 2, 4, 8)
"""Devices of the slices up to eight; CPUs and GPUs come in any number."""
REQUESTS = ({}, {"guidance_scale": 1.0, "guidance_scale_2": 0.0}, {"num_videos": 2}, {"num_videos": 3})
"""Requests that the layout depends on."""


def taken_on(device_count: int) -> set[MeshSizes]:
    """By a CPU or a GPU, and by every generation of TPU, for the demo models and every published one."""
    taken = {parse_mesh("auto", device_count, rows=rows) for rows in (1, 2)}
    if device_count in TPU_COUNTS:
        taken |= {taken_by(work, chip, device_count) for work in set(_workloads()) for chip in CHIPS}
    return taken


def taken_by(work: Workload, chip: str, device_count: int) -> MeshSizes:
    assert find_slice(chip, device_count) is not None
    return parse_mesh("auto", device_count, chip=chip, workload=lambda: work)


def _workloads() -> Iterator[Workload]:
    for changed in REQUESTS:
        for card in model_cards():
            for name in card.published:
                yield published_work(name, **changed)
        for files in map(ModelFiles.open, DEMO_DIRECTORIES):
            yield files.workload(dataclasses.replace(files.defaults, **changed))


def as_text(sizes: MeshSizes) -> str:
    """As `--mesh` takes it, without axes of size 1."""
    axes = {axis: size for axis, size in dataclasses.asdict(sizes).items() if size > 1}
    return ",".join(f"{axis}={size}" for axis, size in axes.items()) or "single"
