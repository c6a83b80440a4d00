"""The program of one step, lowered for TPUs that need not be attached, and the facts that its analysis needs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import torch

from comfy_tpu.compiler.component import Component
from comfy_tpu.config import GenerationSettings, MeshSizes
from comfy_tpu.errors import UnsupportedError
from comfy_tpu.families.context import (
    call_settings,
    choose_method,
    find_windows,
    needs_first_frame,
    window_settings,
)
from comfy_tpu.parallel.chips import Slice, parse_slice
from comfy_tpu.parallel.mesh import abstract_placement
from comfy_tpu.parallel.report import ShardingReport
from comfy_tpu.parallel.runtime_flags import check_runtime_flags
from comfy_tpu.parallel.workload import Workload
from comfy_tpu.pipeline.schedule import HISTORY
from comfy_tpu.pipeline.step import batch_rows, export_step
from comfy_tpu.planning.hlo import stablehlo_shapes
from comfy_tpu.planning.models import PlannedModel

_LARGEST_BLOCK = 2048
"""The largest block of the splash kernel: lengths are padded to multiples of at most this."""


@contextlib.contextmanager
def cpu_only() -> Iterator[None]:
    """Lets jax start the CPU only: nothing is run, and attached chips may be in use by another process."""
    check_runtime_flags()
    before = getattr(jax.config, "jax_platforms")  # noqa: B009 -- an option that its type does not know
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """The facts about a program that its text does not hold."""

    model: str
    size: str
    slice_name: str
    sizes: MeshSizes
    work: Workload
    weight_shapes: tuple[tuple[int, ...], ...]
    """`weights` of `causes.explain_traffic`."""
    resident_bytes: int
    """Bytes of weights, prompt and latents on one device, also of those that this program does not read."""
    argument_bytes: int
    """Bytes of the arguments that the program reads."""
    kernels: int
    """The number of calls of splash in the text: a scanned block has two."""
    square_arrays: tuple[str, ...]
    """Types that hold a score for every pair of tokens of one device."""
    sharding: ShardingReport
    """Of the weights of one transformer."""

    @property
    def unread_bytes(self) -> int:
        return self.resident_bytes - self.argument_bytes

    @property
    def slice(self) -> Slice:
        return parse_slice(self.slice_name)


@dataclasses.dataclass(frozen=True)
class StepProgram:
    facts: ProgramFacts
    serialized: bytes
    """The program as jax.export writes it."""


def lower_step(
    model: PlannedModel, settings: GenerationSettings, work: Workload, slice_: Slice, sizes: MeshSizes
) -> StepProgram:
    with cpu_only():
        return _lower_step(model, settings, work, slice_, sizes)


def _lower_step(
    model: PlannedModel, settings: GenerationSettings, work: Workload, slice_: Slice, sizes: MeshSizes
) -> StepProgram:
    family, size = model.family, f"{settings.width}x{settings.height}x{settings.num_frames}"
    placement = abstract_placement(sizes, platform="tpu", chip=slice_.chip.name)
    component = Component(family.transformer, model.config, placement, dtype=torch.bfloat16)
    card = family.card
    method = choose_method(card, settings, begins_with_image=needs_first_frame(card))
    windows = None
    if find_windows(card, settings, method) is not None:
        windows = work.batch // batch_rows(family, call_settings(card, settings, 1))
    elif method == "continue":
        settings = window_settings(settings)
    embeddings = model.abstract_embeddings(settings if windows is None else call_settings(card, settings, windows))
    exported = export_step(component, family, settings, embeddings, model.latent_channels, windows=windows)
    resident = work.models * sum(slot.bytes_per_device for slot in component.slots)
    resident += 2 * HISTORY * math.prod(exported.latents) * 4
    for array in exported.prepared.values():
        assert array.sharding is not None
        resident += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    text = exported.compute.mlir_module()
    facts = ProgramFacts(
        model=model.name,
        size=size,
        slice_name=slice_.name,
        sizes=sizes,
        work=work,
        weight_shapes=_weight_shapes(component),
        resident_bytes=resident,
        argument_bytes=_argument_bytes(exported.compute, placement.mesh),
        kernels=text.count("tpu_custom_call"),
        square_arrays=square_arrays(stablehlo_shapes(text), work, sizes),
        sharding=component.sharding_report,
    )
    return StepProgram(facts, bytes(serialize(exported.compute)))


def square_arrays(shapes: set[tuple[int, ...]], work: Workload, sizes: MeshSizes) -> tuple[str, ...]:
    """Types with two dimensions as long as the sequence, or one device's part of it: scores of tokens by tokens.

    Short sequences may have them: dense attention is faster there.
    """
    if work.sequence <= work.dense_max_tokens:
        return ()
    features = {size // way for size in _features(work) for way in (1, sizes.tp, sizes.sp, sizes.sp * sizes.tp)}
    found = [shape for shape in shapes if sum(_is_sequence(size, work, sizes, features) for size in shape) > 1]
    return tuple("×".join(map(str, shape)) for shape in sorted(found))


def _features(work: Workload) -> set[int]:
    return {work.ffn, work.text_tokens, *(size for _, matrix in work.matrices for size in matrix.shape)}


def _is_sequence(size: int, work: Workload, sizes: MeshSizes, features: set[int]) -> bool:
    """Whether a size is that of the sequence, padded to a kernel's blocks or not. Sizes of weights are features."""
    lengths = (work.sequence, -(-work.sequence // sizes.sp))
    return size not in features and any(
        length <= size <= -(-length // _LARGEST_BLOCK) * _LARGEST_BLOCK for length in lengths
    )


def _weight_shapes(component: Component) -> tuple[tuple[int, ...], ...]:
    """The shapes of the weights of one layer, as one device computes with them."""
    sizes = dict(component.placement.mesh.shape)
    shapes = set()
    for slot in component.slots:
        spec = component.plan.compute(slot.name).spec
        ways = [
            math.prod(sizes[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ()))
            for entry in (*spec, *(None,) * (len(slot.shape) - len(spec)))
        ]
        local = tuple(size // way for size, way in zip(slot.shape, ways, strict=True))
        shapes.add(local if slot.sources == (slot.name,) else local[1:])
    return tuple(sorted(shape for shape in shapes if len(shape) > 1))


def _argument_bytes(exported: jax.export.Exported, mesh: Any) -> int:
    """Bytes of the arguments on one device. Arguments that the program does not read are not passed to it."""
    total = 0
    for index, (aval, sharding) in enumerate(zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)):
        if index in exported.module_kept_var_idx:
            shape = aval.shape if sharding is None else sharding.shard_shape(aval.shape)
            total += math.prod(shape) * aval.dtype.itemsize
    return total


def serialize(exported: jax.export.Exported) -> bytearray:
    try:
        return exported.serialize()
    except ImportError as error:
        raise UnsupportedError(f"jax cannot write programs here ({error}); pip install flatbuffers") from error
