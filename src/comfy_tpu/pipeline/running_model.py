"""A model on a mesh: its components and programs, made when first used, and its weights, loaded when needed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import torch

from comfy_tpu.bridge import skeleton_limits
from comfy_tpu.compiler.blank_source import BlankSource
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.compiler.program import DeviceProgram, ProgramEvent
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.compiler.stored import open_store
from comfy_tpu.compiler.weights import WeightSource
from comfy_tpu.config import AttentionConfig, Lora, Quantization, RuntimeConfig
from comfy_tpu.errors import CheckpointError, trace_errors
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.shared.tiny_decoders import TINY_VAE
from comfy_tpu.kernels.choice import has_int8_kernel
from comfy_tpu.kernels.quantized import native_format
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.frame_decoder import TINY_DECODER, FrameDecoder, vae_decoder
from comfy_tpu.pipeline.lora import NO_LORAS, Loras, open_loras
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.program_dump import dump_program
from comfy_tpu.pipeline.progress import Progress, ProgressCallback, Stage, ignore_progress, model_title
from comfy_tpu.pipeline.step import StepPrograms
from comfy_tpu.pipeline.tiny_vae import TinyVae
from comfy_tpu.pipeline.vae_backend import vae_functions

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_dtype(name: str, platform: str) -> torch.dtype:
    """The dtype of a name; "auto" is bfloat16, but float32 on a CPU."""
    if name == "auto":
        return DTYPES["float32" if platform == "cpu" else "bfloat16"]
    return DTYPES[name]


def choose_quantization(runtime: RuntimeConfig, placement: Placement) -> Quantization:
    """The chosen quantization; where none is chosen, none, or the devices' own with the preset."""
    if runtime.quantize is not None:
        return runtime.quantize
    return "none" if runtime.fast is None else native_format(placement.platform, placement.chip)


def choose_attention(runtime: RuntimeConfig, placement: Placement) -> AttentionConfig:
    """With the preset, attention in 8 bits where it is faster, unless a kernel is chosen or 8 bits are not wanted."""
    is_open = runtime.fast is not None and runtime.attention.implementation == "auto" and runtime.quantize != "none"
    if is_open and has_int8_kernel(placement.platform, placement.chip):
        return dataclasses.replace(runtime.attention, implementation="int8")
    return runtime.attention


class WeightsKey(NamedTuple):
    """What decides the arrays of a component: the key of its entry in the registry."""

    fingerprint: str
    component: str
    mesh: Any
    precision: Hashable
    loras: Hashable
    backend: str


class RunningModel:
    """A model whose weights are loaded when they are first used, and stay until other weights need the memory."""

    def __init__(
        self,
        files: ModelFiles,
        placement: Placement,
        runtime: RuntimeConfig,
        *,
        residency: Residency,
        on_progress: ProgressCallback = ignore_progress,
        loras: Loras = NO_LORAS,
        blank: bool = False,
        tiny: TinyVae | None = None,
    ) -> None:
        """`blank`: weights are zeros, and of checkpoints only headers are read. `tiny`: the tiny decoder of
        `runtime`."""
        self.files = files
        self.placement = placement
        self.step_placement = placement
        """Where the transformers are; `place_steps` replaces it. Encoders and the VAE stay where they are."""
        self.runtime = runtime
        self.store = open_store(runtime.cache) if runtime.dump is None else None
        """Programs of earlier processes. None with a dump, which shows what is traced, and without a cache."""
        self.dtype = choose_dtype(runtime.dtype, placement.platform)
        self.quantize = choose_quantization(runtime, placement)
        self.attention = choose_attention(runtime, placement)
        self.vae = vae_functions(runtime.vae_backend, files.family)
        self.tiny = tiny
        is_tiny = runtime.vae_backend == "tiny"
        self.decoder: FrameDecoder = TINY_DECODER if is_tiny else vae_decoder(files.family, self.vae)
        """What decodes the frames of results."""
        self.on_progress = on_progress
        """May be replaced between two runs."""
        self.loras = loras
        """The LoRAs of the transformer; replaced by `use_loras`."""
        self.size = ""
        """The size of the current request, for progress reports."""
        self._blank = blank
        self._residency = residency
        self._components: dict[tuple[str, Any], Any] = {}
        self._programs: dict[tuple[Any, ...], DeviceProgram] = {}
        self._checked: set[str] = set()
        self._resident: set[WeightsKey] = set()

    @property
    def family(self) -> ModelFamily:
        return self.files.family

    @property
    def dtype_name(self) -> str:
        """ "bfloat16" or "float32": the dtype of activations and large weights."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def skips_padding(self) -> bool:
        """Whether text padding is left out where a family allows it. In bfloat16 the logarithm of its number would be
        rounded by up to 1.6 %."""
        placement = self.step_placement
        return placement.platform == "cpu" and placement.sizes.device_count == 1 and self.dtype == torch.float32

    def use_loras(self, loras: Sequence[Lora]) -> None:
        """Replaces the LoRAs of the transformer. Nothing is compiled, and weights are loaded when they are used."""
        self.loras = open_loras(loras, self.files)

    def place_steps(self, placement: Placement) -> None:
        """Puts the transformers on another mesh of the same devices. Weights are moved when they are next used."""
        self.step_placement = placement

    def check_components(self, *specs: ComponentSpec) -> None:
        """Raises CheckpointError if the configuration and the weights of a component do not belong together.

        Builds components and reads headers, so that a wrong VAE is not found after the denoising.
        """
        for spec in specs:
            if spec.name in self._checked:
                continue
            try:
                self.component(spec).check(self._checkpoint(spec))
            except CheckpointError as error:
                tiny = self._own_file(spec)
                field, name = ("model", self.files.name) if tiny is None else ("tiny_vae", tiny.path)
                raise CheckpointError(f"{field}={name}: {error}", field=field) from error
            self._checked.add(spec.name)

    def component(self, spec: ComponentSpec) -> Any:
        # Two transformers of one make are one component with two sets of weights: nothing is traced twice.
        first = self.family.transformer
        if spec in self.family.denoiser.transformers and self.files.config(spec) == self.files.config(first):
            spec = first
        placement = self.step_placement if spec in self.family.denoiser.transformers else self.placement
        key = (spec.name, placement.mesh)
        if key not in self._components:
            self._components[key] = self._make_component(spec, placement)
        return self._components[key]

    def _config(self, spec: ComponentSpec) -> dict[str, Any]:
        return self.files.config(spec) if (tiny := self._own_file(spec)) is None else dict(tiny.config)

    def _checkpoint(self, spec: ComponentSpec) -> WeightSource:
        return self.files.checkpoint(spec) if (tiny := self._own_file(spec)) is None else tiny.source

    def _own_file(self, spec: ComponentSpec) -> TinyVae | None:
        """The file of a component that is no part of the model."""
        return self.tiny if spec is TINY_VAE else None

    def _make_component(self, spec: ComponentSpec, placement: Placement) -> Any:
        config, runtime = self._config(spec), self.runtime
        attention = self.attention
        if spec not in self.family.denoiser.transformers:
            # The choice of a kernel is for the transformers: not every kernel takes the masks of text encoders.
            attention = dataclasses.replace(attention, implementation="auto", block_sizes=None)
        options: dict[str, Any] = {"dtype": self.dtype, "attention": attention, "cache": runtime.cache}
        limits = skeleton_limits(tensor.shape for tensor in self._checkpoint(spec).tensors.values())
        component = Component(
            spec, config, placement, quantize=self.quantize, limits=limits, store=self.store, **options
        )
        if spec is self.family.vae.component and self.vae.make_component is not None:
            return self.vae.make_component(config, placement, **options)  # torch's module could be built
        return component

    def program(self, spec: ComponentSpec, function: Callable[..., Any], **options: Any) -> DeviceProgram:
        """The program of a function with these options; the same object for the same arguments."""
        component = self.component(spec)
        key = (component.spec.name, component.placement.mesh, function, _freeze(options))
        if key not in self._programs:
            errors = functools.partial(trace_errors, spec.name, self.files.name)
            self._programs[key] = component.program(function, on_event=self._on_program, trace_errors=errors, **options)
        return self._programs[key]

    @property
    def compiled_count(self) -> int:
        """Compiled programs in memory: one for each function, size and number of videos."""
        return sum(program.compiled_count for program in self._programs.values())

    def forget_programs(self) -> None:
        """Frees the compiled programs. Those that are used again come from the persistent cache, where there is one."""
        self._programs.clear()

    def find_program(self, name: str) -> DeviceProgram:
        """The last made program of a name in progress reports: "transformer.denoise_step"."""
        return next(program for program in reversed(self._programs.values()) if program.name == name)

    def step_programs(self, number: int) -> StepPrograms:
        """The step programs of one of the family's transformers."""
        spec = self.family.denoiser.transformers[number]
        return StepPrograms(self.family.denoiser, functools.partial(self.program, spec))

    @contextlib.contextmanager
    def weights(self, spec: ComponentSpec) -> Iterator[dict[str, jax.Array]]:
        component, transformers = self.component(spec), [part.name for part in self.family.denoiser.transformers]
        loras = self.loras.for_transformer(transformers.index(spec.name)) if spec.name in transformers else NO_LORAS

        def load() -> dict[str, jax.Array]:
            if taken:
                arrays = taken.copy()
                taken.clear()  # a second attempt, for want of memory, reads them again
                with jax.profiler.TraceAnnotation(f"move {spec.name}"):
                    return component.move(arrays)
            changes = {"changes": loras} if loras.key else {}
            on_progress = functools.partial(self.report, "loading", spec.name, part=spec.name)
            with jax.profiler.TraceAnnotation(f"load {spec.name}"):
                source = self._checkpoint(spec)
                source = BlankSource(source) if self._blank else source
                loaded: dict[str, jax.Array] = component.load(source, on_progress, **changes)
            return loaded

        backend = "nnx" if spec is self.family.vae.component and self.vae.make_component is not None else ""
        precision = (self.dtype, self.quantize, self._blank)
        fingerprint = (self._own_file(spec) or self.files).fingerprint
        key = WeightsKey(fingerprint, spec.name, component.placement.mesh, precision, loras.key, backend)
        taken = self._take_from_other_mesh(key, component)
        self._resident.add(key)
        with self._residency.use(
            key,
            label=f"{self.files.name} {spec.name}{loras.label}",
            nbytes_per_device=sum(slot.bytes_per_device for slot in component.slots),
            load=load,
            sharding=component.sharding_report,
            model=f"{model_title(self.files.name)}{loras.label}",
            part=spec.name,
        ) as weights:
            yield weights

    def _take_from_other_mesh(self, key: WeightsKey, component: Any) -> dict[str, jax.Array]:
        """The same weights on another mesh, no longer in the registry; empty if there are none that can be moved."""
        if key in self._residency:
            return {}
        for other in [known for known in self._resident if known._replace(mesh=key.mesh) == key]:
            source = self._components.get((component.spec.name, other.mesh))
            if source is None or not component.can_take_from(source):
                continue
            if (arrays := self._residency.take(other)) is not None:
                self._resident.discard(other)
                return arrays
        return {}

    def unload(self) -> None:
        """Frees the weights that this model put on the devices. A later run loads them again."""
        for key in self._resident:
            self._residency.evict(key)
        self._resident.clear()

    def report(self, stage: Stage, what: str, done: int, total: int, **fields: Any) -> None:
        self.on_progress(Progress(stage, what, done, total, model=model_title(self.files.name), **fields))

    def _on_program(self, event: ProgramEvent) -> None:
        if self.runtime.dump is not None and event.stages is not None:
            dump_program(self.runtime.dump, event.program, self.size, event.stages)
        if event.stage in ("compiling", "cache_miss", "ready"):
            self.report(
                "compiling",
                event.program,
                int(event.stage == "ready"),
                1,
                size=self.size,
                part=event.program.partition(".")[0],
                compiles=event.stage == "cache_miss",
                from_cache=event.from_cache,
            )


def _freeze(value: Any) -> Any:
    """A hashable equivalent of an option."""
    if isinstance(value, dict):
        return tuple(sorted((name, _freeze(each)) for name, each in value.items()))
    return tuple(map(_freeze, value)) if isinstance(value, (list, tuple)) else value
