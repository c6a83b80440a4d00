"""The video pipeline: encode the text, denoise latents, decode frames, each a stage of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import torch

from comfy_tpu.bridge import to_device, to_host
from comfy_tpu.compiler.component import Component, ComponentSpec
from comfy_tpu.compiler.program import Program, ProgramEvent
from comfy_tpu.compiler.residency import Residency, shared_residency
from comfy_tpu.config import MESH_AXES, AttentionConfig, CacheConfig, GenerationSettings, Quantization
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.family import Limits, VideoFamily
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline.decode import decode_frames
from comfy_tpu.pipeline.denoise import initial_noise, make_step, reuse_step
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.progress import Listener, Progress, Stage, ignore
from comfy_tpu.pipeline.reuse import Curve, find_curve
from comfy_tpu.pipeline.schedule import HISTORY, make_schedule
from comfy_tpu.pipeline.settings import check_prompt, check_settings, make_settings
from comfy_tpu.pipeline.step_plan import Plan, make_plan
from comfy_tpu.pipeline.text import PromptEmbeddings, tokenize
from comfy_tpu.quiet import quiet

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_WIDTH = (None, None, None, None, MESH_AXES)
"""A VAE's pictures are split by columns over the whole mesh."""


class VideoPipeline:
    """A model on a mesh. Nothing is loaded before it is needed, and what was loaded stays until its place is needed."""

    def __init__(
        self,
        files: ModelFiles,
        placement: Placement,
        *,
        dtype: torch.dtype,
        quantize: Quantization = "none",
        attention: AttentionConfig,
        cache: CacheConfig,
        residency: Residency,
        on_progress: Listener,
    ) -> None:
        self._files = files
        self._placement = placement
        self._dtype = dtype
        self._quantize: Quantization = quantize
        self._attention = attention
        self._cache = cache
        self._residency = residency
        self.on_progress = on_progress
        """Whoever runs the pipeline next may put another listener here."""
        self._components: dict[str, Component] = {}
        self._programs: dict[str, Program] = {}
        self._size = ""

    @classmethod
    def open(
        cls,
        model: str | Path = "demo",
        *,
        name: str | None = None,
        mesh: str = "auto",
        platform: str = "auto",
        dtype: str = "auto",
        quantize: Quantization = "none",
        attention: AttentionConfig = AttentionConfig(),
        cache: CacheConfig = CacheConfig(),
        residency: Residency | None = None,
        on_progress: Listener = ignore,
        check: Callable[[ModelFiles], object] = lambda files: None,
    ) -> VideoPipeline:
        """Finds and checks the model and the mesh. `dtype` "auto": bfloat16, but float32 on a CPU. `quantize`: the
        transformer's large products in 8 bits, which is faster and not quite the same.

        `name` is what the model is called in labels and messages, instead of `model` itself. `check` is called when the
        model is known and no device is started: what it raises comes before anything about devices.
        """
        if dtype not in ("auto", *DTYPES):
            raise InvalidValueError(f"dtype={dtype!r} is unknown; choose from auto, {', '.join(DTYPES)}")
        files = ModelFiles.open(model, name=name)
        check(files)
        workload = files.family.workload(files.config(files.family.transformer), files.defaults)
        placement = make_placement(mesh, platform=platform, workload=workload)
        chosen = DTYPES["float32" if placement.platform == "cpu" else "bfloat16"] if dtype == "auto" else DTYPES[dtype]
        return cls(
            files,
            placement,
            dtype=chosen,
            quantize=quantize,
            attention=attention,
            cache=cache,
            residency=residency or shared_residency(),
            on_progress=on_progress,
        )

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

    @property
    def text_features(self) -> int:
        """Width of the embeddings that the transformer reads."""
        return self._dimension("text_dim")

    @functools.cached_property
    def defaults(self) -> GenerationSettings:
        return self._files.defaults

    def settings(self, **chosen: Any) -> GenerationSettings:
        """The model's defaults with what was chosen in their place (None: not chosen), checked."""
        return make_settings(self.defaults, chosen, self.limits)

    def encode(self, prompt: str, settings: GenerationSettings) -> PromptEmbeddings:
        check_prompt(prompt)
        check_prompt(self.family.clean_prompt(prompt))
        check_settings(settings, self.limits)
        self._curve_for(settings)  # now: a curve that is missing must not be found after the text encoder is loaded
        guided = settings.guidance_scale > 1
        prompts = [prompt, settings.negative_prompt] if guided else [prompt]
        tokens = tokenize(self._files, prompts, settings.max_sequence_length)
        if any(tokens.cut[1:]):
            logger.warning("negative_prompt is too long; this was cut: %s", tokens.cut[1])
        self._size = f"{settings.max_sequence_length} tokens"
        program = self._program(self.family.text_encoder, self.family.encode_text)
        with self._weights(self.family.text_encoder) as weights:
            self._tell("encoding", "prompt", 0, 1)
            text = to_host(program(weights, input_ids=tokens.input_ids, attention_mask=tokens.attention_mask))
            self._tell("encoding", "prompt", 1, 1)
        return PromptEmbeddings(prompt, text[:1], text[1:] if guided else None, tokens.cut[0])

    def denoise(self, embeddings: PromptEmbeddings, settings: GenerationSettings) -> torch.Tensor:
        """[num_videos, channels, frames, height, width] float32, in the transformer's own scale."""
        for samples, _ in self._steps(embeddings, settings):
            latents = samples[0]
        return to_host(latents, consume=True)

    def velocities(self, embeddings: PromptEmbeddings, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        """What each step of `denoise` takes for the model's answer, in the shape of the latents, on the host."""
        return (to_host(outputs[0]) for _, outputs in self._steps(embeddings, settings))

    def plan(self, settings: GenerationSettings) -> Plan:
        """Which steps are computed, reused and guided. It is known before a run, and does not depend on the prompt."""
        check_settings(settings, self.limits)
        with quiet():  # diffusers may be imported here
            scheduler = self.family.schedulers[settings.scheduler](settings.flow_shift)
        schedule = make_schedule(scheduler, settings.num_inference_steps)
        return make_plan(schedule, settings, self._curve_for(settings))

    def decode(self, latents: torch.Tensor, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        """[num_videos, t, height, width, 3] float32 in 0..1 on the host, as the frames come."""
        check_settings(settings, self.limits)
        self._check_latents(latents, settings)
        return self._decode(latents, settings)

    def _decode(self, latents: torch.Tensor, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        self._size = _size(settings)
        program = self._program(
            self.family.vae, self.family.decode_frame, input_axes={"latent": _WIDTH, "cache": _WIDTH}, donate=("cache",)
        )
        with self._weights(self.family.vae) as weights:
            total = latents.shape[2]
            self._tell("decoding", self._size, 0, total)
            frames = decode_frames(lambda latent, cache: program(weights, latent=latent, cache=cache), latents)
            for index, part in enumerate(frames):
                self._tell("decoding", self._size, index + 1, total)
                yield part

    def to_vae_scale(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as `denoise` gives them, in the scale in which the VAE itself makes and reads them."""
        mean, deviation = self._latent_statistics()
        return latents * deviation + mean

    def from_vae_scale(self, latents: torch.Tensor) -> torch.Tensor:
        """The VAE's own latents, as `decode` wants them."""
        mean, deviation = self._latent_statistics()
        return (latents - mean) / deviation

    def latent_settings(self, latents: torch.Tensor, **chosen: Any) -> GenerationSettings:
        """The settings that latents of this shape were made with, as far as their shape tells."""
        channels = self._dimension("in_channels")
        if latents.ndim != 5 or latents.shape[1] != channels:
            raise InvalidValueError(
                f"latents have shape {tuple(latents.shape)}, expected (videos, {channels}, frames, height, width): "
                "those of another model; decode with the model they were made with"
            )
        videos, _, frames, height, width = latents.shape
        settings = self.settings(**chosen)  # first: a wrong choice is not the latents' fault
        told = {
            "num_videos": videos,
            "num_frames": (frames - 1) * self.family.temporal_scale + 1,
            "height": height * self.family.spatial_scale,
            "width": width * self.family.spatial_scale,
        }
        try:
            return make_settings(settings, told, self.limits)
        except InvalidValueError as error:
            raise InvalidValueError(
                f"latents have shape {tuple(latents.shape)}, which cannot be decoded: {error}"
            ) from error

    def generate(self, prompt: str, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        """All three stages; frames as `decode` gives them."""
        return self.decode(self.denoise(self.encode(prompt, settings), settings), settings)

    def _steps(
        self, embeddings: PromptEmbeddings, settings: GenerationSettings
    ) -> Iterator[tuple[list[jax.Array], list[jax.Array]]]:
        """The last samples and velocities after each step, newest first, until the next one takes over their memory."""
        plan = self.plan(settings)
        self._check_embeddings(embeddings, plan.guided)
        if plan.guided and plan.unguided and settings.num_videos % self._placement.sizes.dp:
            logger.warning(
                "guidance_until=%g saves no time on a mesh with dp=%d, which divides two branches but not one; "
                "choose a mesh with dp=1",
                settings.guidance_until,
                self._placement.sizes.dp,
            )
        self._size = _size(settings)
        spec = self.family.transformer
        options: dict[str, Any] = {"donate": ("samples", "outputs"), "input_axes": {}, "output_axes": ()}
        compute = self._program(spec, self._step, static=("guided",), **options)
        reuse = self._program(spec, reuse_step, **options)
        noise = to_device(initial_noise(self._latent_shape(settings), settings.seed))
        samples: list[Any] = [noise, *(jax.numpy.zeros_like(noise) for _ in range(HISTORY - 1))]
        outputs: list[Any] = [jax.numpy.zeros_like(noise) for _ in range(HISTORY)]
        with self._weights(spec) as loaded:
            weights: dict[str, jax.Array] = {}
            for index, step in enumerate(plan):
                if index in (0, plan.guided):
                    weights.clear()  # first: the keys and values of two branches are not kept beside those of one
                    weights = {**loaded, **self._prompt(loaded, embeddings, step.guided, settings.num_videos)}
                if index == 0:
                    self._tell("denoising", self._size, 0, len(plan))
                state = {"samples": samples, "outputs": outputs, "coefficients": torch.from_numpy(step.coefficients)}
                if step.scale is None:
                    samples, outputs = compute(
                        weights,
                        **state,
                        timestep=torch.tensor([step.timestep], dtype=torch.float32),
                        guidance_scale=torch.tensor(settings.guidance_scale, dtype=torch.float32),
                        guided=step.guided,
                    )
                else:
                    # Without the prompt, whose shape would make it another program where guidance ends.
                    samples, outputs = reuse(loaded, **state, scale=torch.tensor(step.scale, dtype=torch.float32))
                samples[0].block_until_ready()  # so that a step that is announced is done, and Ctrl-C is heard between
                preview = functools.partial(_finished, samples[1], outputs[0], step.sigma)
                self._tell("denoising", self._size, index + 1, len(plan), preview, reused=step.reused)
                yield samples, outputs

    def _prompt(
        self, weights: dict[str, jax.Array], embeddings: PromptEmbeddings, guided: bool, num_videos: int
    ) -> dict[str, jax.Array]:
        """The prompt, and the negative one where there is guidance, as weights of the transformer."""
        prepare = self._program(
            self.family.transformer,
            self.family.prompt_cache,
            input_axes={"text": ("dp",)},
            output_axes=(None, "dp", None, "tp"),
        )
        branches = [embeddings.positive, embeddings.negative] if guided else [embeddings.positive]
        text = torch.cat([branch.expand(num_videos, -1, -1) for branch in branches if branch is not None])
        prepared: dict[str, jax.Array] = prepare(weights, text=text)
        return prepared

    def _curve_for(self, settings: GenerationSettings) -> Curve | None:
        return find_curve(self._files) if settings.reuse > 0 else None

    @functools.cached_property
    def _step(self) -> Callable[..., Any]:
        return make_step(self.family.predict)

    def _check_embeddings(self, embeddings: PromptEmbeddings, guided: int) -> None:
        for branch in (embeddings.positive, embeddings.negative):
            if branch is not None and branch.shape[-1] != self.text_features:
                raise InvalidValueError(
                    f"embeddings have {branch.shape[-1]} features, this model wants {self.text_features}; "
                    "encode the prompt with this model"
                )
        if guided and embeddings.negative is None:
            raise InvalidValueError(
                "guidance_scale is over 1 but the embeddings have no negative prompt; encode with guidance_scale over 1"
            )

    def _latent_shape(self, settings: GenerationSettings) -> tuple[int, ...]:
        family = self.family
        return (
            settings.num_videos,
            self._dimension("in_channels"),
            (settings.num_frames - 1) // family.temporal_scale + 1,
            settings.height // family.spatial_scale,
            settings.width // family.spatial_scale,
        )

    def _dimension(self, name: str) -> int:
        value = self._files.config(self.family.transformer).get(name)
        if not isinstance(value, int):
            raise CheckpointError(
                f"model={self.model_name}: the config.json of its transformer has {name}={value!r}, expected a whole "
                "number; download the model again"
            )
        return value

    def _check_latents(self, latents: torch.Tensor, settings: GenerationSettings) -> None:
        expected = self._latent_shape(settings)
        if tuple(latents.shape) != expected:
            raise InvalidValueError(
                f"latents have shape {tuple(latents.shape)}, expected {expected} for {_size(settings)}; "
                "decode with the settings and the model they were made with"
            )
        if not bool(torch.isfinite(latents).all()):
            raise InvalidValueError("latents hold NaN or infinity; denoise again, with other settings or in float32")

    def _latent_statistics(self) -> list[torch.Tensor]:
        config = self._files.config(self.family.vae)
        return [torch.tensor(values).view(1, -1, 1, 1, 1) for values in self.family.latent_statistics(config)]

    def _component(self, spec: ComponentSpec) -> Component:
        if spec.name not in self._components:
            self._components[spec.name] = Component(
                spec,
                self._files.config(spec),
                self._placement,
                dtype=self._dtype,
                quantize=self._quantize,
                attention=self._attention,
                cache=self._cache,
            )
        return self._components[spec.name]

    def _program(self, spec: ComponentSpec, function: Callable[..., Any], **options: Any) -> Program:
        name = f"{spec.name}.{function.__name__}"
        if name not in self._programs:
            self._programs[name] = self._component(spec).program(function, on_event=self._on_program, **options)
        return self._programs[name]

    @contextlib.contextmanager
    def _weights(self, spec: ComponentSpec) -> Iterator[dict[str, jax.Array]]:
        component = self._component(spec)

        def load() -> dict[str, jax.Array]:
            return component.load(
                self._files.checkpoint(spec), lambda done, total: self._tell("loading", spec.name, done, total)
            )

        with self._residency.use(
            (self.model_fingerprint, spec.name, self._placement.mesh, self._dtype, self._quantize),
            label=f"{self.model_name} {spec.name}",
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


def _finished(sample: jax.Array, velocity: jax.Array, sigma: float) -> torch.Tensor:
    """The first frame as the model sees it without its noise: what a flow's velocity points to."""
    return to_host(sample[:1, :, :1] - sigma * velocity[:1, :, :1])


def _size(settings: GenerationSettings) -> str:
    return f"{settings.width}×{settings.height}×{settings.num_frames}"
