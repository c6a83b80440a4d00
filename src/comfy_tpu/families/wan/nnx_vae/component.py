"""The Flax VAE with the slots, programs and events of a torch module's `Component`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
from flax import nnx
from jax.sharding import PartitionSpec

from comfy_tpu.bridge.dtypes import numpy_dtype
from comfy_tpu.compiler.cache import enable_cache
from comfy_tpu.compiler.program import DeviceProgram
from comfy_tpu.compiler.weights import WeightSlot, WeightSource, abstract_weights, check_checkpoint, load_weights
from comfy_tpu.config import AttentionConfig, CacheConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.wan.nnx_vae.layers import LayerConfig
from comfy_tpu.families.wan.nnx_vae.loading import ChannelsLast, checkpoint_name
from comfy_tpu.families.wan.nnx_vae.vae import WanVAE, read_architecture
from comfy_tpu.families.wan.vae import VAE
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.parallel.report import ShardingReport, make_report
from comfy_tpu.parallel.rules import WeightSharding, replicate


class NnxComponent:
    """The Wan 2.1 VAE on a placement. It holds no weights. Weights are replicated; the image is split."""

    spec = VAE

    def __init__(
        self,
        config: Mapping[str, Any],
        placement: Placement,
        *,
        dtype: torch.dtype,
        attention: AttentionConfig = AttentionConfig(),
        cache: CacheConfig = CacheConfig(),
    ) -> None:
        architecture = read_architecture(config)
        layer_config = LayerConfig(numpy_dtype(dtype), placement, attention)
        self.placement = placement
        self._cache = cache
        self._graph, state = nnx.split(nnx.eval_shape(lambda: WanVAE(architecture, layer_config, rngs=nnx.Rngs(0))))
        self._paths = {checkpoint_name(path): path for path, _ in nnx.to_flat_state(state)}
        self.slots = tuple(
            WeightSlot(name, (name,), parameter.shape, parameter.dtype, placement.sharding())
            for name, (_, parameter) in zip(self._paths, nnx.to_flat_state(state), strict=True)
        )

    @functools.cached_property
    def sharding_report(self) -> ShardingReport:
        whole = PartitionSpec()
        return make_report(
            self.placement.sizes,
            [
                WeightSharding(
                    slot.name, replicate("*"), math.prod(slot.shape) * slot.dtype.itemsize, whole, whole, False
                )
                for slot in self.slots
            ],
        )

    def load(
        self, checkpoint: WeightSource, on_progress: Callable[[int, int], None] | None = None
    ) -> dict[str, jax.Array]:
        """Loads the weights, under diffusers' names and in the layout of the Flax model."""
        enable_cache(self._cache)
        return load_weights(ChannelsLast(checkpoint), self.slots, on_progress=on_progress)

    def check(self, checkpoint: WeightSource) -> None:
        """Raises CheckpointError if `load` would refuse the checkpoint. Reads no weight."""
        check_checkpoint(ChannelsLast(checkpoint), self.slots)

    def abstract_weights(self) -> dict[str, jax.ShapeDtypeStruct]:
        return abstract_weights(self.slots)

    def model(self, weights: Mapping[str, jax.Array]) -> WanVAE:
        parameters = {path: nnx.Param(weights[name]) for name, path in self._paths.items()}
        return nnx.merge(self._graph, nnx.from_flat_state(parameters))

    def program(self, function: Callable[..., Any], **options: Any) -> DeviceProgram:
        """`function(model, **inputs)` on arrays; `options` are those of `DeviceProgram`."""
        return _NnxProgram(self, function, placement=self.placement, cache=self._cache, **options)


class _NnxProgram(DeviceProgram):
    def __init__(self, component: NnxComponent, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(f"{component.spec.name}_nnx.{function.__name__}", function, **options)
        self._component = component
        self._function = function

    def _call(self, weights: dict[str, jax.Array], inputs: dict[str, Any]) -> Any:
        with jax.default_matmul_precision("highest"):  # as in a trace of torch's modules: float32 means float32
            return self._function(self._component.model(weights), **inputs)

    def _check_weights(self, weights: dict[str, Any]) -> None:
        expected = {slot.name: slot.shape for slot in self._component.slots}
        given = {name: tuple(array.shape) for name, array in weights.items()}
        if odd := sorted(name for name, _ in expected.items() ^ given.items()):
            raise InvalidValueError(
                f"{self.name}: weight {odd[0]} has shape {given.get(odd[0])}, expected {expected.get(odd[0])}; "
                "use what `load` of this program's component returns"
            )
