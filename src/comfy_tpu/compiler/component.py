"""A component of a model (transformer, text encoder, VAE): its skeleton, sharding plan, weight slots and programs."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from comfy_tpu.bridge import TraceContext, build_skeleton
from comfy_tpu.compiler.cache import enable_cache
from comfy_tpu.compiler.merging import DeviceMerge, MergedSource, WeightChanges
from comfy_tpu.compiler.module_weights import ModuleWeights, find_foreign_code
from comfy_tpu.compiler.packed_weights import ConvertedSource, PackedWeight
from comfy_tpu.compiler.program import Program, method_name
from comfy_tpu.compiler.quantization import SCALE_SUFFIX, QuantizedSource, quantize_layers
from comfy_tpu.compiler.stacking import LayerStack, stack_layers
from comfy_tpu.compiler.stored import NotDescribableError, ProgramOrigin, ProgramStore
from comfy_tpu.compiler.weights import (
    WeightSlot,
    WeightSource,
    abstract_weights,
    check_checkpoint,
    load_weights,
    move_weights,
)
from comfy_tpu.config import AttentionConfig, CacheConfig, Quantization, ShardingConfig, SkeletonLimits
from comfy_tpu.errors import CheckpointError, InvalidValueError, config_errors, import_error
from comfy_tpu.parallel.mesh import check_heads
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.parallel.report import ShardingReport
from comfy_tpu.parallel.rules import Rule, ShardingPlan, plan_shardings, replicate
from comfy_tpu.quiet import quiet

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ComponentSpec:
    """The facts of one of a family's modules that generic code needs."""

    name: str
    """The component's name, and that of its folder in a model directory."""
    classes: tuple[str, ...]
    """The classes that its `config.json` may name."""
    build: Callable[[Mapping[str, Any]], torch.nn.Module]
    """Builds the module from the component's `config.json`."""
    rules: tuple[Rule, ...]
    heads: str | None = None
    """The configuration key with the number of attention heads."""
    stacks: tuple[LayerStack, ...] = ()
    float32: tuple[str, ...] = ()
    """Globs of weights that stay float32 whatever the model's dtype is."""
    quantized: tuple[str, ...] = ()
    """Globs of linear layers that compute in 8 bits if quantization is chosen."""
    shard_attention: bool = True
    """Whether attention is split over the mesh. False: each device computes all heads, so tp need not divide them."""
    rename: Callable[[str], str] | None = None
    """Converts a name in the checkpoint to the module's. None: the names are the same."""
    unused: tuple[str, ...] = ()
    """Globs of tensors that a checkpoint may hold and the component does not need."""
    packed: Callable[[Mapping[str, Any]], tuple[PackedWeight, ...]] | None = None
    """(configuration) -> the weights that consist of several parts."""


class Component:
    """A component on a placement. It holds no weights: `load` returns them, and the residency registry keeps them."""

    def __init__(
        self,
        spec: ComponentSpec,
        config: Mapping[str, Any],
        placement: Placement,
        *,
        dtype: torch.dtype,
        attention: AttentionConfig = AttentionConfig(),
        cache: CacheConfig = CacheConfig(),
        sharding: ShardingConfig = ShardingConfig(),
        quantize: Quantization = "none",
        scan: bool = True,
        limits: SkeletonLimits = SkeletonLimits(),
        store: ProgramStore | None = None,
    ) -> None:
        """`limits`: what the module may allocate while it is built, where its checkpoint is known. `store`: finds
        weights and programs of earlier processes, so that the module is built only when something is traced.
        """
        if not dtype.is_floating_point:
            raise InvalidValueError(
                f"{spec.name}: dtype={dtype} is not a floating dtype; use torch.bfloat16 or torch.float32"
            )
        self.heads = 1 if spec.heads is None else _heads(spec, config)
        check_heads(self.heads, placement.sizes.tp)
        self.spec = spec
        self.placement = placement
        self._cache = cache
        self._store = store
        self._quantize = quantize
        self._make_module = functools.partial(_make_module, spec, config, quantize, scan, limits)
        with config_errors(f"the config.json of the {spec.name}"):
            self._packed = spec.packed(config) if spec.packed and placement.sizes.tp > 1 else ()
            decided_by = {"spec": spec, "config": config, "dtype": dtype, "quantize": quantize, "scan": scan}
            weights = self._read_weights(dtype, decided_by)
        shapes = weights.shapes
        sources = {name: weights.sources(name) for name in shapes}
        stacked = [name for name, names in sources.items() if names != (name,)]
        rules = (*spec.rules, *_rules_for_scales(spec.rules, shapes))
        self.plan: ShardingPlan = plan_shardings(rules, shapes, placement, stacked, config=sharding)
        self.slots = tuple(
            WeightSlot(name, sources[name], shape.shape, shape.dtype, self.plan.storage(name))
            for name, shape in shapes.items()
        )
        self.context = TraceContext(
            placement=placement,
            attention=attention if spec.shard_attention else dataclasses.replace(attention, over_mesh=False),
            weight_axes={name: self._layer_axes(name, name in stacked) for name in shapes},
        )
        how = (self.context.attention, sharding)
        traced = (decided_by, how, weights.code)
        self._origin = None if self._store is None else ProgramOrigin(self._store, traced, self._find_foreign_code)

    def _find_foreign_code(self) -> str:
        return find_foreign_code(self.module)

    @functools.cached_property
    def module(self) -> torch.nn.Module:
        return self._make_module()

    @functools.cached_property
    def sharding_report(self) -> ShardingReport:
        return self.plan.report()

    def _read_weights(self, dtype: torch.dtype, decided_by: Any) -> ModuleWeights:
        def make() -> ModuleWeights:
            return ModuleWeights.of(self.module, dtype, self.spec.float32)

        def make_stored() -> dict[str, Any]:
            if foreign := find_foreign_code(self.module):
                raise NotDescribableError(f"{foreign}, which another package has replaced")
            made = make()
            if unknown := [name for name, found in made.code.items() if not found]:
                raise NotDescribableError(f"{unknown[0]}, whose source is not found")
            return made.write()

        if self._store is None:
            return make()
        try:
            written = self._store.fact(
                "weights", decided_by, make_stored, is_current=ModuleWeights.is_current, name=self.spec.name
            )
        except NotDescribableError as error:
            logger.info("the programs of the %s are not stored: they depend on %s", self.spec.name, error)
            self._store = None
            return make()
        return ModuleWeights.read(written)

    def _layer_axes(self, name: str, stacked: bool) -> PartitionSpec:
        spec = self.plan.entries[name].compute
        return PartitionSpec(*spec[1:]) if stacked else spec

    def load(
        self,
        checkpoint: WeightSource,
        on_progress: Callable[[int, int], None] | None = None,
        changes: WeightChanges | None = None,
    ) -> dict[str, jax.Array]:
        """Loads the weights onto the devices and adds `changes`: on the devices, or on the host if they depend on the
        weights or these are quantized or packed afterwards.

        A change has the module's name, and its columns in the checkpoint's order.
        """
        enable_cache(self._cache)  # writing layers into large stacks compiles a little, too
        checkpoint = self._rename_source(checkpoint)
        if changes is not None and (self._quantize != "none" or self._packed or changes.reads_weights):
            checkpoint, changes = MergedSource(checkpoint, changes), None
        checkpoint = self._pack_source(checkpoint)
        options: dict[str, Any] = {"on_progress": on_progress, "ignore_unused": self.spec.unused, "store": self._store}
        if changes is None:
            return load_weights(checkpoint, self.slots, **options)
        try:
            return load_weights(checkpoint, self.slots, change=DeviceMerge(changes), **options)
        finally:
            changes.close()

    def can_take_from(self, other: Component) -> bool:
        """Whether the weights of the same component on another mesh can be moved here.

        Packed weights have their columns in an order that depends on tp. Between processes nothing is moved.
        """
        has_other_order = self._packed != other._packed or (
            bool(self._packed) and self.placement.sizes.tp != other.placement.sizes.tp
        )
        return not has_other_order and jax.process_count() == 1

    def move(self, weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The weights of the same component on another mesh, moved to this one. The given dictionary is emptied."""
        enable_cache(self._cache)  # a move compiles a little
        return move_weights(weights, self.slots)

    def check(self, checkpoint: WeightSource) -> None:
        """Raises CheckpointError if `load` would refuse the checkpoint. Reads no weight."""
        check_checkpoint(self._pack_source(self._rename_source(checkpoint)), self.slots, self.spec.unused)

    def _rename_source(self, checkpoint: WeightSource) -> WeightSource:
        """The checkpoint with the names of the slots."""
        if self.spec.rename is None:
            return checkpoint
        return ConvertedSource(checkpoint, rename=self.spec.rename, packed=(), tp=1)

    def _pack_source(self, checkpoint: WeightSource) -> WeightSource:
        """The checkpoint with the order and the dtypes of the slots."""
        if self._packed:
            tp = self.placement.sizes.tp
            checkpoint = ConvertedSource(checkpoint, rename=None, packed=self._packed, tp=tp)
        if self._quantize != "none":
            scaled = {slot.name for slot in self.slots if slot.name + SCALE_SUFFIX in self.plan.entries}
            weights = [source for slot in self.slots if slot.name in scaled for source in slot.sources]
            checkpoint = QuantizedSource(checkpoint, weights, self._quantize)
        return checkpoint

    def abstract_weights(self) -> dict[str, jax.ShapeDtypeStruct]:
        return abstract_weights(self.slots)

    def program(self, method: str | Callable[..., Any] = "forward", **options: Any) -> Program:
        """A program over this component's weights; `options` are those of `Program`."""
        name = f"{self.spec.name}.{method_name(method)}"
        origin = self._origin and dataclasses.replace(self._origin, parts=(self._origin.parts, method))
        options = {"cache": self._cache, "origin": origin, **options}
        return Program(lambda: self.module, context=self.context, method=method, name=name, **options)


def _rules_for_scales(rules: tuple[Rule, ...], names: Iterable[str]) -> list[Rule]:
    """The rules, and one that replicates each scale that no rule matches. Scales lie along the outputs, like a bias."""
    scales = [name for name in names if name.endswith(SCALE_SUFFIX)]
    return [replicate(name) for name in scales if not any(fnmatch.fnmatchcase(name, rule.pattern) for rule in rules)]


def _heads(spec: ComponentSpec, config: Mapping[str, Any]) -> int:
    assert spec.heads is not None
    heads = config.get(spec.heads)
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise CheckpointError(
            f"the config.json of the {spec.name} has {spec.heads}={heads!r}, expected a whole number from 1; download "
            "the model again"
        )
    return heads


def _make_module(
    spec: ComponentSpec, config: Mapping[str, Any], quantize: Quantization, scan: bool, limits: SkeletonLimits
) -> torch.nn.Module:
    """The component's skeleton, its layers quantized and stacked as asked."""
    with config_errors(f"the config.json of the {spec.name}"):
        module = build_skeleton(lambda: _build(spec, config), limits)
        quantize_layers(module, spec.quantized, quantize)
        if scan:
            stack_layers(module, spec.stacks)
    return module


def _build(spec: ComponentSpec, config: Mapping[str, Any]) -> torch.nn.Module:
    try:
        with quiet():  # accelerate, where it is installed, adds a warning filter when diffusers imports it
            return spec.build(config)
    except ImportError as error:
        raise import_error(f"the library of the {spec.name}", error) from error
