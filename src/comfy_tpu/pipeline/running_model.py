"""A model on a mesh: its components and programs, made when first used, and its weights, loaded when needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import torch

from comfy_tpu.bridge import skeleton_limits
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.compiler.program import DeviceProgram, ProgramEvent
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import (
    VAE_BACKEND,
    AttentionConfig,
    CacheConfig,
    GenerationSettings,
    Lora,
    Quantization,
    VaeBackend,
)
from comfy_tpu.errors import CheckpointError, trace_errors
from comfy_tpu.families.family import Limits, VideoFamily
from comfy_tpu.nnx import vae_component
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.lora import NO_LORAS, Loras, open_loras
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.progress import Listener, Progress, Stage
from comfy_tpu.pipeline.vae_backend import vae_functions

if TYPE_CHECKING:
    from comfy_tpu.nnx.component import NnxComponent

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class RunningModel:
    """Nothing is loaded before it is needed, and what was loaded stays until its place is needed."""

    def __init__(
        self,
        files: ModelFiles,
        placement: Placement,
        *,
        dtype: torch.dtype,
        quantize: Quantization = "none",
        vae_backend: VaeBackend = VAE_BACKEND,
        attention: AttentionConfig,
        cache: CacheConfig,
        residency: Residency,
        on_progress: Listener,
        loras: Loras = NO_LORAS,
    ) -> None:
        self._files = files
        self._placement = placement
        self._dtype = dtype
        self._quantize: Quantization = quantize
        self._vae = vae_functions(vae_backend, files.family)
        self._attention = attention
        self._cache = cache
        self._residency = residency
        self.on_progress = on_progress
        """Whoever runs the pipeline next may put another listener here."""
        self.loras = loras
        """In the transformer. Others by `use_loras`."""
        self._components: dict[str, Component | NnxComponent] = {}
        self._programs: dict[str, DeviceProgram] = {}
        self._checked: set[str] = set()
        self._size = ""

    def use_loras(self, loras: Sequence[Lora]) -> None:
        """From now on the transformer has these, and no others. Nothing is loaded before it is needed, or compiled."""
        self.loras = open_loras(loras, self._files)

    @property
    def model_name(self) -> str:
        return self._files.name

    @property
    def model_fingerprint(self) -> str:
        return self._files.fingerprint

    @property
    def directory(self) -> Path:
        return self._files.directory

    @property
    def dtype_name(self) -> str:
        """ "bfloat16" or "float32": what the model computes in."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def family(self) -> VideoFamily:
        return self._files.family

    @property
    def limits(self) -> Limits:
        return self.family.limits

    def embedding_shapes(self, settings: GenerationSettings) -> Mapping[str, tuple[int, ...]]:
        """What `encode` gives of a prompt, by name, without the row's own dimension."""
        return self._files.embedding_shapes(settings)

    @functools.cached_property
    def defaults(self) -> GenerationSettings:
        return self._files.defaults

    def latent_shape(self, settings: GenerationSettings) -> tuple[int, ...]:
        family = self.family
        return (
            settings.num_videos,
            self._latent_channels,
            (settings.num_frames - 1) // family.temporal_scale + 1,
            settings.height // family.spatial_scale,
            settings.width // family.spatial_scale,
        )

    @property
    def _latent_channels(self) -> int:
        return self._files.latent_channels

    def _latent_statistics(self) -> list[torch.Tensor]:
        return [torch.tensor(values).view(1, -1, 1, 1, 1) for values in self._files.latent_statistics]

    def _component(self, spec: ComponentSpec) -> Component | NnxComponent:
        # Two transformers of one make are one component with two sets of weights: nothing is traced twice.
        first = self.family.transformer
        if spec in self.family.transformers and self._files.config(spec) == self._files.config(first):
            spec = first
        if spec.name not in self._components:
            self._components[spec.name] = self._make_component(spec)
        return self._components[spec.name]

    def _make_component(self, spec: ComponentSpec) -> Component | NnxComponent:
        config = self._files.config(spec)
        options: dict[str, Any] = {"dtype": self._dtype, "attention": self._attention, "cache": self._cache}
        tensors = self._files.checkpoint(spec).tensors.values()
        limits = skeleton_limits(tensor.shape for tensor in tensors)
        component = Component(spec, config, self._placement, quantize=self._quantize, limits=limits, **options)
        if spec is self.family.vae and self._vae.backend == "nnx":  # torch's module has shown that it can be built
            return vae_component(config, self._placement, **options)
        return component

    def check_components(self, *specs: ComponentSpec) -> None:
        """Raises CheckpointError where the configuration and the weights of a component do not belong together.

        Builds components and reads headers: what is wrong with the VAE must not be found after the denoising.
        """
        for spec in specs:
            if spec.name in self._checked:
                continue
            try:
                self._component(spec).check(self._files.checkpoint(spec))
            except CheckpointError as error:
                raise CheckpointError(f"model={self.model_name}: {error}") from error
            self._checked.add(spec.name)

    def _program(self, spec: ComponentSpec, function: Callable[..., Any], **options: Any) -> DeviceProgram:
        component = self._component(spec)
        name = f"{component.spec.name}.{function.__name__}"
        if name not in self._programs:
            options["trace_errors"] = functools.partial(trace_errors, spec.name, self.model_name)
            self._programs[name] = component.program(function, on_event=self._on_program, **options)
        return self._programs[name]

    @contextlib.contextmanager
    def _weights(self, spec: ComponentSpec) -> Iterator[dict[str, jax.Array]]:
        component = self._component(spec)
        numbers = {part.name: number for number, part in enumerate(self.family.transformers)}
        loras = self.loras.of(numbers[spec.name]) if spec.name in numbers else NO_LORAS

        def tell(done: int, total: int) -> None:
            self._tell("loading", spec.name, done, total)

        def load() -> dict[str, jax.Array]:
            checkpoint = self._files.checkpoint(spec)
            changes = {"changes": loras} if loras.key else {}
            return component.load(checkpoint, tell, **changes)

        layout = self._vae.backend if spec is self.family.vae else ""
        with self._residency.use(
            (self.model_fingerprint, spec.name, self._placement.mesh, self._dtype, self._quantize, loras.key, layout),
            label=f"{self.model_name} {spec.name}{loras.label}",
            nbytes_per_device=sum(slot.bytes_per_device for slot in component.slots),
            load=load,
        ) as weights:
            yield weights

    def _on_program(self, event: ProgramEvent) -> None:
        if event.stage in ("compiling", "ready"):
            self.on_progress(
                Progress(
                    "compiling", f"{event.program} at {self._size}", int(event.stage == "ready"), 1, event.from_cache
                )
            )

    def _tell(
        self,
        stage: Stage,
        what: str,
        done: int,
        total: int,
        preview: Callable[[], torch.Tensor] | None = None,
        *,
        reused: bool = False,
    ) -> None:
        self.on_progress(Progress(stage, what, done, total, preview=preview, reused=reused))
