"""The video pipeline: encode the text, denoise latents, decode frames, each a stage of its own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import torch
from PIL import Image

from comfy_tpu.bridge import to_device, to_host
from comfy_tpu.compiler.residency import Residency, shared_residency
from comfy_tpu.config import (
    MESH_AXES,
    VAE_BACKEND,
    AttentionConfig,
    CacheConfig,
    GenerationSettings,
    Lora,
    Quantization,
    VaeBackend,
)
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.checks import (
    check_boundary,
    check_embeddings,
    check_latents,
    check_made,
    size_text,
    warn_of_ignored,
)
from comfy_tpu.pipeline.decode import decode_frames
from comfy_tpu.pipeline.denoise import initial_noise, make_step, picture_noise, reuse_step
from comfy_tpu.pipeline.generators import closed_at_exit
from comfy_tpu.pipeline.images import as_pixels, as_rgb, as_values, cropped, fingerprint, video_parts
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.picture import Beginning, check_picture, first_step
from comfy_tpu.pipeline.progress import Listener, ignore
from comfy_tpu.pipeline.reuse import Curve, find_curve
from comfy_tpu.pipeline.running_model import DTYPES, RunningModel
from comfy_tpu.pipeline.schedule import HISTORY, make_schedule
from comfy_tpu.pipeline.settings import check_images, check_prompt, check_settings, make_settings
from comfy_tpu.pipeline.step_plan import Plan, PlannedStep, guidance_of, make_plan
from comfy_tpu.pipeline.text import PromptEmbeddings, tokenize
from comfy_tpu.pipeline.vae_backend import check_vae_backend
from comfy_tpu.quiet import quiet
from comfy_tpu.terminal_text import excerpt

logger = logging.getLogger(__name__)


class VideoPipeline(RunningModel):
    """The stages of a model."""

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
        vae_backend: VaeBackend = VAE_BACKEND,
        attention: AttentionConfig = AttentionConfig(),
        cache: CacheConfig = CacheConfig(),
        residency: Residency | None = None,
        on_progress: Listener = ignore,
        loras: Sequence[Lora] = (),
        check: Callable[[ModelFiles], object] = lambda files: None,
    ) -> VideoPipeline:
        """Finds and checks the model and the mesh. `dtype` "auto": bfloat16, but float32 on a CPU. `quantize`: the
        transformer's large products in 8 bits, which is faster and not quite the same. `vae_backend` "nnx": the VAE as
        it is written in Flax, for models that have Wan 2.1's.

        `name` is what the model is called in labels and messages, instead of `model` itself. `check` is called when the
        model is known and no device is started: what it raises comes before anything about devices.
        """
        if dtype not in ("auto", *DTYPES):
            raise InvalidValueError(f"dtype={dtype!r} is unknown; choose from auto, {', '.join(DTYPES)}")
        files = ModelFiles.open(model, name=name)
        check(files)
        check_vae_backend(vae_backend, files)
        opened = open_loras(loras, files)
        workload = files.workload(files.defaults)
        placement = make_placement(mesh, platform=platform, workload=workload)
        chosen = DTYPES["float32" if placement.platform == "cpu" else "bfloat16"] if dtype == "auto" else DTYPES[dtype]
        return cls(
            files,
            placement,
            dtype=chosen,
            quantize=quantize,
            vae_backend=vae_backend,
            attention=attention,
            cache=cache,
            residency=residency or shared_residency(),
            on_progress=on_progress,
            loras=opened,
        )

    def settings(self, **chosen: Any) -> GenerationSettings:
        """The model's defaults with what was chosen in their place (None: not chosen), checked."""
        return make_settings(self.defaults, chosen, self.limits)

    def encode(self, prompt: str, settings: GenerationSettings, images: Sequence[Image.Image] = ()) -> PromptEmbeddings:
        """`images`: the first frame and maybe the last, for models that begin with a picture; or those to look at."""
        check_images(self.model_name, self.family.image, len(images), settings)
        self._fitted(images, settings)  # now: one of no use must not be found after the text encoder is loaded
        text = self.encode_text(prompt, settings)
        if not images:
            return text
        shared = self.encode_images(images, settings)
        return dataclasses.replace(text, shared=shared, pictures=fingerprint(images))

    def encode_text(self, prompt: str, settings: GenerationSettings) -> PromptEmbeddings:
        check_prompt(prompt)
        check_prompt(self.family.clean_prompt(prompt))
        check_settings(settings, self.limits)
        check_boundary(self, settings)
        self._curve_for(settings)  # now: a curve that is missing must not be found after the text encoder is loaded
        self.check_components(*self.family.components)
        guided = self._is_guided(settings)
        prompts = [prompt, settings.negative_prompt] if guided else [prompt]
        rows: dict[str, torch.Tensor] = {}
        cut = ""
        self._size = f"{settings.max_sequence_length} tokens"
        count = len(self.family.text_encoders)
        for done, encoder in enumerate(self.family.text_encoders):
            tokens = tokenize(self._files, encoder, prompts, settings.max_sequence_length)
            cut = cut or tokens.cut[0]
            if any(tokens.cut[1:]):
                logger.warning("negative_prompt is too long; this was cut: %s", excerpt(tokens.cut[1]))
            program = self._program(encoder.component, encoder.encode)
            with self._weights(encoder.component) as weights:
                self._tell("encoding", "prompt", done, count)
                made = {name: to_host(array) for name, array in program(weights, **tokens.inputs).items()}
                check_made(f"the {encoder.component.name}", made, self.dtype_name)
                rows |= made
                self._tell("encoding", "prompt", done + 1, count)
        positive, negative = ({name: row[at : at + 1] for name, row in rows.items()} for at in (0, 1))
        return PromptEmbeddings(prompt, positive, negative if guided else None, cut)

    def encode_images(self, images: Sequence[Image.Image], settings: GenerationSettings) -> dict[str, torch.Tensor]:
        """What the family makes of the pictures, by name, the same for every branch."""
        check_settings(settings, self.limits)
        family = self.family.image
        check_images(self.model_name, family, len(images), settings)
        assert family is not None
        assert self._vae.encode_frames is not None
        images = self._fitted(images, settings)
        seen: dict[str, torch.Tensor] = {}
        if family.encoder is not None and family.embed is not None:
            values = as_values(self._files.image_processor(family.processor), images)
            embed = self._program(family.encoder, family.embed)
            with self._weights(family.encoder) as weights:
                self._tell("encoding", "picture", 0, 1)
                seen |= {name: to_host(array) for name, array in embed(weights, pixel_values=values).items()}
            check_made(f"the {family.encoder.name}", seen, self.dtype_name)
        self._size = size_text(settings)
        encode = self._program(
            self.family.vae, self._vae.encode_frames, input_axes=self._vae.encode_axes, donate=("cache",)
        )
        parts = list(self._picture_parts(images, settings))
        latents: list[torch.Tensor] = []
        with self._weights(self.family.vae) as weights:
            cache = None
            for done, pixels in enumerate(parts, 1):
                latent, after = encode(weights, pixels=pixels, cache=cache)
                cache = None if family.references else after
                latents.append(to_host(latent))
                self._tell("encoding", "picture", done, len(parts))
        check_made(
            "the VAE's encoder", {f"part {index}": latent for index, latent in enumerate(latents)}, self.dtype_name
        )
        return seen | family.condition(latents, len(images), settings)

    def _fitted(self, images: Sequence[Image.Image], settings: GenerationSettings) -> list[Image.Image]:
        """As the family wants them, RGB, or refused. Those that are squeezed to the frame keep their sizes here."""
        family = self.family.image
        images = [as_rgb(image) for image in images]
        if family is not None and family.references is not None:
            return [family.references.fit(image) for image in images]
        return [cropped(image, settings) for image in images] if family and family.fit == "crop" else images

    def _picture_parts(self, images: Sequence[Image.Image], settings: GenerationSettings) -> Iterable[torch.Tensor]:
        """What the VAE encodes at a time, [1, 3, frames, height, width] in -1..1."""
        family = self.family.image
        assert family is not None
        if family.references is not None:
            return [as_pixels(image) for image in images]
        parts = video_parts(images, settings, self.family.temporal_scale)
        return itertools.islice(parts, 1 if family.first_only else None)

    def encode_picture(self, picture: torch.Tensor, settings: GenerationSettings, strength: float) -> Beginning:
        """To denoise from a picture, [1, height, width, 3] in 0..1. `strength`: how much of it is made anew."""
        check_settings(settings, self.limits)
        encode = self.family.encode_picture
        if encode is None:
            raise InvalidValueError(f"image cannot be used: {self.family.name} does not start from a picture")
        check_picture(picture, settings, strength)
        self._size = size_text(settings)
        program = self._program(self.family.vae, encode, input_axes={"picture": (None, None, MESH_AXES)})
        noise, _ = picture_noise(self.latent_shape(settings), settings.seed)
        with self._weights(self.family.vae) as weights:
            latents = to_host(program(weights, picture=picture, noise=noise))
        check_made("the VAE's encoder", {"latents": latents}, self.dtype_name)
        return Beginning(latents, strength)

    def denoise(
        self, embeddings: PromptEmbeddings, settings: GenerationSettings, beginning: Beginning | None = None
    ) -> torch.Tensor:
        """[num_videos, channels, frames, height, width] float32, in the transformer's own scale."""
        for samples, _ in self._steps(embeddings, settings, beginning):
            latents = samples[0]
        made = to_host(latents, consume=True)
        check_made("denoising", {"latents": made}, self.dtype_name)
        image = self.family.image
        return image.finish(made, embeddings.shared) if image and image.finish and embeddings.shared else made

    def velocities(self, embeddings: PromptEmbeddings, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        """What each step of `denoise` takes for the model's answer, in the shape of the latents, on the host."""
        return (to_host(outputs[0]) for _, outputs in self._steps(embeddings, settings))

    def plan(self, settings: GenerationSettings, strength: float = 1.0) -> Plan:
        """Which steps are computed, reused and guided. It is known before a run, and does not depend on the prompt."""
        check_settings(settings, self.limits)
        check_boundary(self, settings)
        with quiet():  # diffusers may be imported here
            scheduler = self._files.scheduler(settings)
        if self.family.guidance != "branches":
            settings = dataclasses.replace(settings, guidance_until=0.0)
        begin = first_step(settings.num_inference_steps, strength)
        with self._files.scheduler_errors():
            schedule = make_schedule(scheduler, begin)
        return make_plan(schedule, settings, self._curve_for(settings))

    def decode(self, latents: torch.Tensor, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        """[num_videos, t, height, width, 3] float32 in 0..1 on the host, as the frames come."""
        check_settings(settings, self.limits)
        check_latents(latents, self.latent_shape(settings), settings)
        self.check_components(self.family.vae)
        return self._decode(latents, settings)

    @closed_at_exit
    def _decode(self, latents: torch.Tensor, settings: GenerationSettings) -> Generator[torch.Tensor, None, None]:
        self._size = size_text(settings)
        program = self._program(
            self.family.vae, self._vae.decode_frame, input_axes=self._vae.decode_axes, donate=("cache",)
        )
        with self._weights(self.family.vae) as weights:
            total = 1 if self.family.whole else latents.shape[2]
            self._tell("decoding", self._size, 0, total)
            frames = decode_frames(
                lambda latent, cache: program(weights, latent=latent, cache=cache),
                latents,
                self.family.first_cache,
                whole=self.family.whole,
                tiles=self.family.tiles,
            )
            for index, part in enumerate(frames):
                check_made("the VAE's decoder", {"frames": part}, self.dtype_name)
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
        channels = self._latent_channels
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

    def generate(
        self, prompt: str, settings: GenerationSettings, images: Sequence[Image.Image] = ()
    ) -> Iterator[torch.Tensor]:
        """All three stages; frames as `decode` gives them."""
        return self.decode(self.denoise(self.encode(prompt, settings, images), settings), settings)

    @closed_at_exit
    def _steps(
        self, embeddings: PromptEmbeddings, settings: GenerationSettings, beginning: Beginning | None = None
    ) -> Generator[tuple[list[jax.Array], list[jax.Array]], None, None]:
        """The last samples and velocities after each step, newest first, until the next one takes over their memory."""
        plan = self.plan(settings, 1.0 if beginning is None else beginning.strength)
        self.check_components(*self.family.transformers, self.family.vae)
        check_embeddings(self, embeddings, plan.guided, settings)
        warn_of_ignored(self.family, self.defaults, settings)
        if plan.guided and plan.unguided and settings.num_videos % self._placement.sizes.dp:
            logger.warning(
                "guidance_until=%g saves no time on a mesh with dp=%d, which divides two branches but not one; "
                "choose a mesh with dp=1",
                settings.guidance_until,
                self._placement.sizes.dp,
            )
        self._size = size_text(settings)
        with quiet():  # these are programs too, which the compile cache may fail to read or store
            first = to_device(self._first_sample(plan, settings, beginning))
            samples: list[Any] = [first, *(jax.numpy.zeros_like(first) for _ in range(HISTORY - 1))]
            outputs: list[Any] = [jax.numpy.zeros_like(first) for _ in range(HISTORY)]
        done = 0
        for (number, guided), steps in itertools.groupby(plan, lambda step: (step.transformer, step.guided)):
            with self._weights(self.family.transformers[number]) as loaded:
                weights, prepared = self._prompt(number, loaded, embeddings, guided, settings)
                if done == 0:
                    self._tell("denoising", self._size, 0, len(plan))
                for step in steps:
                    samples, outputs = self._advance(step, loaded, weights, prepared, samples, outputs)
                    # So that a step that is announced is done, and Ctrl-C is heard between two.
                    samples[0].block_until_ready()
                    done += 1
                    if done == 1:  # broken weights show at once: 49 steps later would be minutes
                        check_made("the first step", {"latents": to_host(samples[0])}, self.dtype_name)
                    preview = functools.partial(_finished, samples[1], outputs[0], step.sigma)
                    self._tell("denoising", self._size, done, len(plan), preview, reused=step.reused)
                    yield samples, outputs
                # The keys and values of two branches are not kept beside those of one.
                del weights, prepared

    def _first_sample(self, plan: Plan, settings: GenerationSettings, beginning: Beginning | None) -> torch.Tensor:
        shape = self.latent_shape(settings)
        if beginning is None:
            return initial_noise(shape, settings.seed)
        check_latents(beginning.latents.expand(shape[0], -1, -1, -1, -1), self.latent_shape(settings), settings)
        sigma = plan.steps[0].sigma
        return sigma * picture_noise(shape, settings.seed)[1] + (1 - sigma) * beginning.latents

    def _advance(
        self,
        step: PlannedStep,
        loaded: dict[str, jax.Array],
        weights: dict[str, jax.Array],
        prepared: dict[str, jax.Array],
        samples: list[jax.Array],
        outputs: list[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """One step. `weights` are the loaded ones and the prompt's."""
        spec = self.family.transformers[step.transformer]
        options: dict[str, Any] = {"donate": ("samples", "outputs"), "output_axes": ()}
        state = {"samples": samples, "outputs": outputs, "coefficients": torch.from_numpy(step.coefficients)}
        if step.scale is not None:
            reuse = self._program(spec, reuse_step, **options)
            # Without the prompt, whose shape would make it another program where guidance ends.
            after: Any = reuse(loaded, **state, scale=torch.tensor(step.scale, dtype=torch.float32))
        else:
            options["input_axes"] = {"prepared": ("dp",)}
            compute = self._program(spec, self._step, static=("guided",), **options)
            after = compute(
                weights,
                **state,
                timestep=torch.tensor([step.timestep], dtype=torch.float32),
                guidance_scale=torch.tensor(step.guidance_scale, dtype=torch.float32),
                prepared=prepared,
                guided=step.guided,
            )
        return after[0], after[1]

    def _prompt(
        self,
        number: int,
        loaded: dict[str, jax.Array],
        embeddings: PromptEmbeddings,
        guided: bool,
        settings: GenerationSettings,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """The prompt, and the negative one where there is guidance: the weights with it, and inputs of a step."""
        shared = {**embeddings.shared, **self.family.conditions(settings)}
        names = [*embeddings.positive, *shared]
        prepare = self._program(
            self.family.transformers[number],
            self.family.prepare,
            input_axes=dict.fromkeys(names, ("dp",)),
            output_axes=self.family.prepared_axes,
        )
        branches = [
            {**branch, **shared}
            for branch in (embeddings.positive, embeddings.negative if guided else None)
            if branch is not None
        ]
        rows = {
            name: torch.cat([branch[name].expand(settings.num_videos, *branch[name].shape[1:]) for branch in branches])
            for name in names
        }
        prepared: dict[str, jax.Array] = prepare(loaded, **rows)
        as_weights = {name: array for name, array in prepared.items() if "." in name}
        return {**loaded, **as_weights}, {name: array for name, array in prepared.items() if "." not in name}

    def _is_guided(self, settings: GenerationSettings) -> bool:
        return self.family.guidance == "branches" and max(guidance_of(settings)) > 1

    def _curve_for(self, settings: GenerationSettings) -> Curve | None:
        return find_curve(self._files) if settings.reuse > 0 else None

    @functools.cached_property
    def _step(self) -> Callable[..., Any]:
        return make_step(self.family.predict)


def _finished(sample: jax.Array, velocity: jax.Array, sigma: float) -> torch.Tensor:
    """The first frame as the model sees it without its noise: what a flow's velocity points to."""
    return to_host(sample[:1, :, :1] - sigma * velocity[:1, :, :1])
