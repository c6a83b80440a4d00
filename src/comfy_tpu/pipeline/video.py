"""The video pipeline: encode the text, denoise latents, decode frames, each a stage of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from comfy_tpu.bridge import to_host
from comfy_tpu.compiler.residency import Residency, shared_residency
from comfy_tpu.compiler.stored import open_store
from comfy_tpu.config import FastSettings, GenerationSettings, Lora, RuntimeConfig, SingleFiles
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.card import Limits, ModelCard
from comfy_tpu.families.context import (
    Method,
    begins_with_image,
    choose_method,
    needs_first_frame,
    seen_settings,
    settle_context,
    window_counts,
    window_settings,
)
from comfy_tpu.families.media import FittedMedia
from comfy_tpu.families.model_family import ModelFamily
from comfy_tpu.families.presets import PresetChoice
from comfy_tpu.families.settings import (
    check_images,
    check_prompt,
    check_settings,
    guidance_scales,
    make_settings,
    settings_of_latents,
)
from comfy_tpu.families.shared.packed_sound import split_sound
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.parallel.placement import Placement
from comfy_tpu.pipeline import artifacts
from comfy_tpu.pipeline.checks import (
    check_boundary,
    check_context,
    check_embeddings,
    check_finite,
    check_latents,
    check_tiled_media,
    check_window,
    size_text,
    warn_of_cut,
    warn_of_ignored,
)
from comfy_tpu.pipeline.continuation import decode_continued, denoise_continued
from comfy_tpu.pipeline.decode import count_parts, decode_frames
from comfy_tpu.pipeline.denoise import State, denoise_steps
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.fast import find_unusable
from comfy_tpu.pipeline.generators import close_at_exit
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia, as_given
from comfy_tpu.pipeline.initial import check_strength, default_strength, first_step, read_strength, without_initial
from comfy_tpu.pipeline.latent_scale import from_vae_scale, to_vae_scale
from comfy_tpu.pipeline.lora import Loras, open_loras
from comfy_tpu.pipeline.lora_report import check_before_download
from comfy_tpu.pipeline.media_encoding import encode_first_frame, encode_frames, encode_media
from comfy_tpu.pipeline.media_fitting import fit_media
from comfy_tpu.pipeline.media_segments import decode_media_segments, denoise_media_segments
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.padding import restore_padding, trim_tokens
from comfy_tpu.pipeline.presets import choose_preset, with_own_lora
from comfy_tpu.pipeline.preview_colours import PreviewColours
from comfy_tpu.pipeline.preview_images import ColourPreviews, Previews
from comfy_tpu.pipeline.progress import ProgressCallback, ignore_progress
from comfy_tpu.pipeline.reuse import Curve, find_curve
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.runtime_checks import check_runtime
from comfy_tpu.pipeline.schedule import Schedule, make_schedule
from comfy_tpu.pipeline.single_files import open_model
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.step import batch_rows, count_branches, latent_shape
from comfy_tpu.pipeline.step_checkpoint import StepCheckpoint, digest_embeddings
from comfy_tpu.pipeline.step_plan import Plan, make_plan
from comfy_tpu.pipeline.text import tokenize
from comfy_tpu.pipeline.tiny_previews import TinyPreviews
from comfy_tpu.pipeline.tiny_vae import choose_tiny_vae
from comfy_tpu.pipeline.vae_backend import check_vae_backend, split_columns
from comfy_tpu.quiet import quiet

logger = logging.getLogger(__name__)


class VideoPipeline:
    """The stages of a model. `running` holds its weights and programs."""

    def __init__(self, running: RunningModel, place: Callable[[GenerationSettings], Placement] | None = None) -> None:
        """`place`: (settings) -> where the steps of a request are computed; None: always where `running` is."""
        self.running = running
        self._place = place or (lambda settings: running.placement)
        self.files = running.files
        self.defaults: GenerationSettings = running.files.defaults
        self._placements: dict[Hashable, Placement] = {}
        self._has_placed_steps = False
        self.preset = PresetChoice(running.files.presets)
        """The preset that was chosen with the LoRAs."""
        self._said: set[str] = set()
        """Warnings that were given, each of which is given once."""

    @classmethod
    def open(
        cls,
        model: str | Path | SingleFiles = "demo",
        runtime: RuntimeConfig = RuntimeConfig(),
        *,
        name: str | None = None,
        residency: Residency | None = None,
        on_progress: ProgressCallback = ignore_progress,
        loras: Sequence[Lora] = (),
        preset: str | None = None,
        check: Callable[[ModelFiles], object] = lambda files: None,
        blank: bool = False,
    ) -> VideoPipeline:
        """Finds and checks the model and the mesh; loads and compiles nothing.

        `name` replaces `model` in labels and messages. `residency` replaces the registry of `runtime.memory`. `check`
        is called after the model is found and before devices are started, so that its errors come first. `blank`:
        weights are zeros, which nothing is read for. `preset`: as in `use_loras`.
        """
        check_runtime(runtime)
        if not isinstance(model, SingleFiles):
            check_before_download(loras, str(model))
        files = open_model(model, name=name, ignored_keys=runtime.ignored_config_keys)
        check(files)
        check_window(runtime.attention, files)
        vae = files.family.vae.component
        check_vae_backend(runtime.vae_backend, files.family, lambda: files.config(vae), takes_tiny=True)
        tiny = choose_tiny_vae(runtime, files)
        opened = open_loras(with_own_lora(files, loras, preset), files)
        choice = choose_preset(files, opened, preset)

        def place(settings: GenerationSettings) -> Placement:
            return make_placement(
                runtime.mesh,
                platform=runtime.platform,
                workload=lambda: files.workloads(settings, open_store(runtime.cache)),
                # Windows are as many rows as there are branches, or twice as many.
                rows=max(window_counts(files.family.card, settings)[:2]) * batch_rows(files.family, settings),
            )

        placement = place(files.defaults)
        if residency is None:
            residency = shared_residency() if runtime.memory is None else Residency(runtime.memory)
        options: dict[str, Any] = {"on_progress": on_progress, "loras": opened, "blank": blank, "tiny": tiny}
        running = RunningModel(files, placement, runtime, residency=residency, **options)
        pipeline = cls(running, place if runtime.mesh == "auto" else None)
        pipeline.preset = choice
        return pipeline

    @property
    def model_name(self) -> str:
        return self.files.name

    @property
    def model_fingerprint(self) -> str:
        return self.files.fingerprint

    @property
    def directory(self) -> Path:
        return self.files.directory

    @property
    def family(self) -> ModelFamily:
        return self.files.family

    @property
    def card(self) -> ModelCard:
        return self.family.card

    @property
    def limits(self) -> Limits:
        return self.card.limits

    @property
    def latent_channels(self) -> int:
        return self.files.latent_channels

    @property
    def has_two_transformers(self) -> bool:
        return len(self.family.denoiser.transformers) > 1

    @property
    def preview_colours(self) -> PreviewColours | None:
        return self.files.preview_colours

    @functools.cached_property
    def previews(self) -> Previews | None:
        """What shows latents: a tiny decoder where there is one, else the model's colours; None: nothing does.

        On several hosts, colours: a program of all devices would wait for hosts that make no previews.
        """
        if self.running.tiny is not None and jax.process_count() == 1:
            return TinyPreviews(self.running)
        return None if self.preview_colours is None else ColourPreviews(self.preview_colours)

    @property
    def tiny_vae(self) -> str:
        """The fingerprint of the tiny decoder that makes the frames; empty: the VAE does."""
        tiny = self.running.tiny
        return tiny.fingerprint if tiny is not None and self.running.runtime.vae_backend == "tiny" else ""

    def warn_of_ignored(self, settings: GenerationSettings) -> None:
        warn_of_ignored(self.family, self.defaults, settings)

    def warn_of_preset(self, settings: GenerationSettings) -> None:
        """Warns, once, where the settings are not those that the model or a LoRA is recognised to be distilled for."""
        for field, sentence in self.preset.warnings(settings, has_branches=self._has_branches):
            self._warn_once(field, sentence)

    @property
    def placement(self) -> Placement:
        """Where the steps of the last request were computed; at first, those of the model's defaults would be."""
        return self.running.step_placement

    def choose_placement(self, settings: GenerationSettings) -> Placement:
        """The placement of a request's steps: that of the chosen mesh, or the best one for the request with "auto"."""
        counts = window_counts(self.family.card, settings)
        asked = (batch_rows(self.family, settings), self.family.card.latent_size(self._step_settings(settings)), counts)
        if asked not in self._placements:
            self._placements[asked] = self._place(settings)
        return self._placements[asked]

    @property
    def dtype_name(self) -> str:
        return self.running.dtype_name

    @property
    def quantization(self) -> str:
        """What the transformer computes in 8 bits, such as "fp8, int8 scores"; empty: nothing."""
        products = () if self.running.quantize == "none" else (self.running.quantize,)
        scores = ("int8 scores",) if self.running.attention.implementation == "int8" else ()
        return ", ".join((*products, *scores))

    @property
    def attention_window(self) -> str:
        """The attention window as text; empty where every token attends to all."""
        window = self.running.runtime.attention.window
        return "" if window is None else str(window)

    @property
    def loras(self) -> Loras:
        return self.running.loras

    def use_loras(self, loras: Sequence[Lora], preset: str | None = None) -> None:
        """Replaces the LoRAs of the transformer, and `preset`. Nothing is compiled, and weights are loaded when they
        are used.

        `preset`: the name of one of the model's presets, or "auto" for the one that a LoRA or the model was made for.
        """
        self.running.use_loras(with_own_lora(self.files, loras, preset))
        self.preset = choose_preset(self.files, self.running.loras, preset)

    @property
    def on_progress(self) -> ProgressCallback:
        """May be replaced between two runs."""
        return self.running.on_progress

    @on_progress.setter
    def on_progress(self, callback: ProgressCallback) -> None:
        self.running.on_progress = callback

    def settings(self, **chosen: Any) -> GenerationSettings:
        """The model's defaults, replaced by `RuntimeConfig.fast` and by the chosen values (None: not chosen), checked.
        Those of `preset` are among the chosen ones where the caller wants them."""
        settings, fast = make_settings(self.defaults, chosen, self.limits), self.running.runtime.fast
        if fast is None:
            return settings
        open_choices = [name for name in dataclasses.asdict(fast) if chosen.get(name) is None]
        return self._apply_fast(fast, settings, open_choices)

    def _apply_fast(
        self, fast: FastSettings, settings: GenerationSettings, open_choices: Collection[str]
    ) -> GenerationSettings:
        """`open_choices`: the settings that the user has not chosen."""
        unusable = find_unusable(self.files, settings, self.choose_placement(settings))
        asked = {*open_choices, *(("quantize",) if self.running.runtime.quantize is None else ())}
        reasons = "; ".join(f"{name} ({reason})" for name, reason in unusable.items() if name in asked)
        if reasons:
            self._warn_once("fast", f"fast is used without {reasons}")
        values = {name: getattr(fast, name) for name in open_choices if name not in unusable}
        return make_settings(settings, values, self.limits)

    def _warn_once(self, field: str, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("%s", sentence, extra={"field": field})

    def settle_context(self, settings: GenerationSettings, images: Collection[Any]) -> GenerationSettings:
        """The settings of a video from these images, for stages that are not given the images."""
        return settle_context(self.family.card, settings, images)

    def embedding_shapes(self, settings: GenerationSettings) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the embeddings that `encode` returns for a prompt, by name, without the batch dimension."""
        return self.files.embedding_shapes(settings)

    def latent_shape(self, settings: GenerationSettings) -> tuple[int, ...]:
        return latent_shape(self.family, self.files.latent_channels, settings)

    def encode(
        self, prompt: str, settings: GenerationSettings, given: GivenMedia | Sequence[Image.Image] = NO_MEDIA
    ) -> PromptEmbeddings:
        """Embeddings of a prompt, and of given media: images alone may be given as they are."""
        given = as_given(given)
        media = self._fit(given, settings)  # now: what is of no use must not be found after the encoder is loaded
        text = self.encode_text(prompt, settings, (*given.images, *given.references))
        shared = self._encode_media(media, given, settings)
        return dataclasses.replace(text, shared=shared, images_fingerprint=given.fingerprint)

    def encode_text(
        self, prompt: str, settings: GenerationSettings, images: Sequence[Image.Image] = ()
    ) -> PromptEmbeddings:
        """Embeddings of a prompt. `images`: those of `encode`, for a model whose text encoder sees them."""
        if self.family.card.image is not None and self.family.card.image.seen_by_text_encoder:
            check_images(self.model_name, self.family.card.image, len(images), settings)
        check_prompt(prompt)
        check_prompt(self.family.text.clean_prompt(prompt))
        check_settings(settings, self.limits)
        check_boundary(self.family, self.model_name, settings)
        check_context(self.family.card, self.model_name, settings)
        check_window(self.running.runtime.attention, self.files, self._step_settings(settings))
        self._curve_for(settings)  # now: a curve that is missing must not be found after the text encoder is loaded
        running, encoders = self.running, self.family.text.encoders
        # The first request: later ones may be encoded while another one's steps are computed.
        if not self._has_placed_steps:
            self._has_placed_steps = True
            running.place_steps(self.choose_placement(settings))
        running.check_components(*self.family.components, running.decoder.component)
        guided = self._is_guided(settings)
        prompts = [prompt, settings.negative_prompt] if guided else [prompt]
        rows: dict[str, torch.Tensor] = {}
        held: dict[str, Any] = {}
        cut = ""
        running.size = f"{settings.max_sequence_length} tokens"
        for done, encoder in enumerate(encoders):
            tokens = tokenize(self.files, encoder, prompts, settings.max_sequence_length, images)
            cut = cut or tokens.cut[0]
            if any(tokens.cut[1:]):
                warn_of_cut("negative_prompt", tokens.cut[1])
            trims = encoder.zeroes_padding and running.skips_padding
            inputs = trim_tokens(tokens.inputs) if trims else tokens.inputs
            program = running.program(encoder.component, encoder.encode)
            with running.weights(encoder.component) as weights:
                running.report("encoding", "prompt", done, len(encoders))
                with jax.profiler.TraceAnnotation(f"encode prompt with {encoder.component.name}"):
                    taken = {name: held.pop(name) for name in encoder.takes}
                    arrays = dict(program(weights, **inputs, **taken))
                    del taken
                    later = {name for following in encoders[done + 1 :] for name in following.takes}
                    held |= {name: arrays.pop(name) for name in list(arrays) if name in later}
                    made = {name: to_host(array) for name, array in arrays.items()}
                if trims:
                    made = {name: restore_padding(row, tokens.length) for name, row in made.items()}
                check_finite(f"the {encoder.component.name}", made, self.dtype_name)
                rows |= made
                running.report("encoding", "prompt", done + 1, len(encoders))
        positive, negative = ({name: row[at : at + 1] for name, row in rows.items()} for at in (0, 1))
        return PromptEmbeddings(prompt, positive, negative if guided else None, cut)

    def encode_media(
        self, given: GivenMedia | Sequence[Image.Image], settings: GenerationSettings
    ) -> dict[str, torch.Tensor]:
        """Embeddings of given media by name, the same for every branch of guidance."""
        given = as_given(given)
        return self._encode_media(self._fit(given, settings), given, settings)

    def encode_first_frame(self, image: Image.Image, settings: GenerationSettings) -> torch.Tensor:
        """Latents of an image as the first frame of a video, [1, channels, 1, height, width]."""
        return encode_first_frame(self.running, image, settings)

    def encode_frames(self, frames: npt.NDArray[np.uint8], settings: GenerationSettings) -> torch.Tensor:
        """Latents of a whole video or image, [1, channels, frames, height, width], in the transformer's scale.

        `frames`: [frames, height, width, 3] of any size, resized to that of `settings`.
        """
        check_settings(settings, self.limits)
        self.running.size = size_text(settings)
        with jax.profiler.TraceAnnotation("encode images and videos"):
            return encode_frames(self.running, frames, settings)

    def _fit(self, given: GivenMedia, settings: GenerationSettings) -> FittedMedia:
        check_settings(settings, self.limits)
        self._check_continued(settings, given)
        check_tiled_media(self.family.card, self.model_name, settings, given)
        config = self.files.config(self.family.transformer)
        return fit_media(self.family, config, given, self._media_settings(settings, given), self.model_name)

    def _encode_media(
        self, media: FittedMedia, given: GivenMedia, settings: GenerationSettings
    ) -> dict[str, torch.Tensor]:
        encoding = self.family.media
        if not given and not (encoding is not None and encoding.encodes_nothing):
            return {}
        settings = self._media_settings(settings, given)
        self.running.size = size_text(settings)
        strength = default_strength(self.family.card) if given.strength is None else given.strength
        with jax.profiler.TraceAnnotation("encode images and videos"):
            return encode_media(self.running, media, settings, strength)

    def denoise(
        self,
        embeddings: PromptEmbeddings,
        settings: GenerationSettings,
        *,
        seeds: Sequence[int] = (),
        checkpoint: StepCheckpoint | None = None,
    ) -> torch.Tensor:
        """Latents [num_videos, channels, frames, height, width], float32, in the transformer's scale. The sound's are
        in the last frames (families/shared/packed_sound.py).

        `seeds`: one of each video, instead of `settings.seed`, for the embeddings of several prompts
        (`embeddings.merge_embeddings`). `checkpoint`: where the steps are saved, and go on from; the caller removes it.
        """
        card, method = self.family.card, self._context_method(settings, without_initial(embeddings.shared))
        if checkpoint is not None or method == "continue":
            plan = self._check_steps(embeddings, settings)
        if checkpoint is not None:
            described = self._describe_steps(embeddings, settings, seeds)
            segments = card.segment_count(settings) if method == "continue" else 1
            checkpoint.begin(described, steps=len(plan), segments=segments)
        if method == "continue":
            denoise = denoise_media_segments if card.makes_segments else denoise_continued
            return denoise(self, card, embeddings, settings, seeds, checkpoint)
        return self.denoise_segment(embeddings, settings, seeds, checkpoint)

    def denoise_segment(
        self,
        embeddings: PromptEmbeddings,
        settings: GenerationSettings,
        seeds: Sequence[int],
        checkpoint: StepCheckpoint | None,
    ) -> torch.Tensor:
        """`denoise` of a video that is made whole or by windows, or of a segment of a longer one."""
        with contextlib.nullcontext() if checkpoint is None else checkpoint.deferring_signals():
            for samples, _ in self._steps(embeddings, settings, seeds, checkpoint):
                latents = samples[0]
        made = to_host(latents, consume=True)
        check_finite("denoising", {"latents": made}, self.dtype_name)
        made = made[:, :, made.shape[2] - self.latent_shape(settings)[2] :]  # without reference images
        media, given = self.family.media, without_initial(embeddings.shared)
        return media.finish(made, given) if media and media.finish and given else made

    def velocities(self, embeddings: PromptEmbeddings, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        """The velocity of each step of `denoise`, in the shape of the latents, on the host."""
        return (to_host(outputs[0]) for _, outputs in self._steps(embeddings, settings))

    def plan(self, settings: GenerationSettings, strength: float = 1.0) -> Plan:
        """Which steps are computed, reused and guided. The plan does not depend on the prompt."""
        check_settings(settings, self.limits)
        check_boundary(self.family, self.model_name, settings)
        check_context(self.family.card, self.model_name, settings)
        check_strength(self.family.card, strength, settings)
        begin = first_step(self.family.card, settings.num_inference_steps, strength)
        schedule = self._schedule(self._step_settings(settings), begin)
        return make_plan(
            schedule,
            settings,
            self._curve_for(settings),
            is_guided=self.family.card.is_guided,
            branches=count_branches(self.family, settings, guided=True),
        )

    def _schedule(self, settings: GenerationSettings, begin: int) -> Schedule:
        def make() -> Schedule:
            with quiet():  # diffusers may be imported here
                scheduler = self.files.scheduler(settings)
            with self.files.scheduler_errors():
                return make_schedule(scheduler, begin)

        store = self.running.store
        if store is None:
            return make()
        timing = dataclasses.replace(settings, seed=0, negative_prompt="")
        decided_by = (self.files.schedulers[settings.scheduler], timing, begin)
        return Schedule.read(store.fact("schedule", decided_by, lambda: make().write(), name=settings.scheduler))

    def decode(self, latents: torch.Tensor, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        """Yields frames [num_videos, t, height, width, 3], float32 in 0..1 on the host, as they are decoded."""
        check_settings(settings, self.limits)
        check_latents(latents, self.latent_shape(settings), settings)
        self.running.check_components(self.running.decoder.component)
        card = self.family.card
        if choose_method(card, settings, begins_with_image=needs_first_frame(card)) == "continue":
            decode = decode_media_segments if card.makes_segments else decode_continued
            return decode(self, card, latents, settings)
        return self._decode(latents[:, :, : card.latent_frames(settings)], settings)

    def decode_sound(self, latents: torch.Tensor, settings: GenerationSettings) -> Waveform | None:
        """The sounds of the videos, as long as their frames; None of a model that makes none."""
        sound, card, running = self.family.sound, self.family.card, self.running
        if sound is None:
            return None
        check_settings(settings, self.limits)
        check_latents(latents, self.latent_shape(settings), settings)
        running.check_components(sound.vae, sound.vocoder)
        running.size = size_text(settings)
        _, tokens = split_sound(latents, card.latent_frames(settings), card.sound_tokens(settings))
        with jax.profiler.TraceAnnotation("decode sound"):
            with running.weights(sound.vae) as weights:
                spectrogram = running.program(sound.vae, sound.decode)(weights, latents=tokens.contiguous())
            with running.weights(sound.vocoder) as weights:
                made = running.program(sound.vocoder, sound.synthesize)(weights, spectrogram=spectrogram)
        samples = to_host(made).float()
        check_finite("the vocoder", {"sound": samples}, self.dtype_name)
        rate = sound.sample_rate(self.files.config(sound.vocoder))
        return Waveform(samples, rate).fitted(settings.num_frames / settings.fps)

    def part_count(self, latent_frames: int) -> int:
        """The parts in which latents of this many frames are decoded, as progress counts them."""
        decoder = self.running.decoder
        return count_parts(latent_frames, all_frames=decoder.decodes_all_frames, tiles=decoder.tiles)

    def decode_segment(
        self, latents: torch.Tensor, settings: GenerationSettings, before: int, total: int
    ) -> Iterator[torch.Tensor]:
        """`decode` of a part of a longer video, after `before` of `total` parts."""
        return self._decode(latents, settings, before, total)

    @close_at_exit
    def _decode(
        self, latents: torch.Tensor, settings: GenerationSettings, before: int = 0, total: int = 0
    ) -> Generator[torch.Tensor, None, None]:
        """`before`: parts of the video that are decoded already, of `total`; 0: these latents are the whole video."""
        running, decoder = self.running, self.running.decoder
        size = running.size = size_text(settings)
        axes = split_columns(decoder.axes, latents.shape[-1], running.placement)
        program = running.program(decoder.component, decoder.decode_frame, input_axes=axes, donate=("cache",))
        with running.weights(decoder.component) as weights:
            total = total or self.part_count(latents.shape[2])
            running.report("decoding", "", before, total, size=size)
            frames = decode_frames(
                lambda latent, cache: program(weights, latent=latent, cache=cache),
                latents,
                decoder.first_cache,
                all_frames=decoder.decodes_all_frames,
                tiles=decoder.tiles,
            )
            for index, part in enumerate(frames):
                check_finite("the VAE's decoder", {"frames": part}, self.dtype_name)
                running.report("decoding", "", before + index + 1, total, size=size)
                yield part

    def to_vae_scale(self, latents: torch.Tensor) -> torch.Tensor:
        """Converts latents of `denoise` to the VAE's scale."""
        return to_vae_scale(latents, self.files.latent_statistics)

    def from_vae_scale(self, latents: torch.Tensor) -> torch.Tensor:
        """Converts latents in the VAE's scale to the scale of `decode`."""
        return from_vae_scale(latents, self.files.latent_statistics)

    def latent_settings(self, latents: torch.Tensor, **chosen: Any) -> GenerationSettings:
        """The settings of latents, as far as their shape determines them."""
        return settings_of_latents(
            tuple(latents.shape), self.files.latent_channels, self.family.card, self.defaults, chosen
        )

    def generate(
        self, prompt: str, settings: GenerationSettings, given: GivenMedia | Sequence[Image.Image] = NO_MEDIA
    ) -> Iterator[torch.Tensor]:
        """Runs all three stages; yields frames as `decode` does."""
        given = as_given(given)
        settings = self.settle_context(settings, given.images)
        return self.decode(self.denoise(self.encode(prompt, settings, given), settings), settings)

    @close_at_exit
    def _steps(
        self,
        embeddings: PromptEmbeddings,
        settings: GenerationSettings,
        seeds: Sequence[int] = (),
        checkpoint: StepCheckpoint | None = None,
    ) -> Generator[State, None, None]:
        plan = self._check_steps(embeddings, settings)
        yield from denoise_steps(self.running, plan, embeddings, settings, seeds, checkpoint)

    def _describe_steps(
        self, embeddings: PromptEmbeddings, settings: GenerationSettings, seeds: Sequence[int]
    ) -> dict[str, str]:
        """All that decides the bits of the latents, as far as it is known."""
        running = self.running
        described = artifacts.describe(
            embeddings.prompt,
            settings,
            self,
            images_fingerprint=embeddings.images_fingerprint,
            loras=self.loras.text,
            attention_window=self.attention_window,
            quantization=self.quantization,
        )
        del described["model"]  # the name; its fingerprint decides
        placement = running.step_placement
        return {
            **described,
            "seeds": " ".join(map(str, seeds)),
            "embeddings": digest_embeddings(embeddings),
            "devices": f"{placement.platform} {placement.chip}",
            "mesh": f"{placement.sizes}, VAE {running.placement.sizes}",
            "attention": str(running.attention),
            "vae_backend": running.runtime.vae_backend,
            "jax": jax.__version__,
        }

    def _check_steps(self, embeddings: PromptEmbeddings, settings: GenerationSettings) -> Plan:
        """The plan of the steps, after a check of what they need, and with the transformers at their place."""
        plan = self.plan(settings, read_strength(embeddings.shared))
        self.running.place_steps(self.choose_placement(settings))
        self.running.check_components(*self.family.denoiser.transformers, self.running.decoder.component)
        check_window(self.running.runtime.attention, self.files, self._step_settings(settings))
        check_embeddings(self.files, embeddings, plan.guided, settings)
        self.warn_of_ignored(settings)
        self.running.size = size_text(settings)
        return plan

    @property
    def _has_branches(self) -> bool:
        """Whether guidance_scale over 1 is a second forward, with the negative prompt."""
        return self.family.card.guidance == "classifier_free"

    def _step_settings(self, settings: GenerationSettings) -> GenerationSettings:
        """The settings of the videos that the transformer sees: windows or segments of a long one, or tiles."""
        return seen_settings(self.family.card, settings)

    def _media_settings(self, settings: GenerationSettings, given: GivenMedia) -> GenerationSettings:
        """The settings that media are encoded for: an image is that of one segment."""
        continues = self._context_method(settings, given.images) == "continue"
        return window_settings(settings) if continues and not self.family.card.makes_segments else settings

    def _context_method(self, settings: GenerationSettings, images: Collection[Any]) -> Method:
        """How a video is made. `images`: those that are given, or their embeddings. Raises InvalidValueError where it
        cannot be made so from them."""
        card, with_image = self.family.card, begins_with_image(self.family.card, images)
        method = choose_method(card, settings, begins_with_image=with_image)
        if method == "continue" and not with_image and not card.makes_segments:
            raise InvalidValueError(
                f"context=continue goes on from an image, and {self.model_name} "
                + ("was given none; give one, or choose static" if card.image else "takes none; choose static"),
                field="context",
            )
        if with_image and method not in ("none", "continue") and not self.family.denoiser.frame_inputs:
            raise InvalidValueError(
                f"context={settings.context} is windows, and {self.model_name} keeps a first frame in all of them; "
                "choose continue, or leave the image out",
                field="context",
            )
        return method

    def _check_continued(self, settings: GenerationSettings, given: GivenMedia) -> None:
        """Raises InvalidValueError for media that a long video of these settings cannot use."""
        method = self._context_method(settings, given.images)
        if method == "continue" and len(given.images) > 1 and not self.family.card.makes_segments:
            raise InvalidValueError(
                f"last_image cannot be reached by a video of {settings.num_frames} frames that is continued every "
                f"{settings.context_frames}; choose context=static or none, or leave it out",
                field="last_image",
            )
        if method not in ("none", "continue") and given.references:
            raise InvalidValueError(
                f"reference is for videos that are made whole, and {settings.num_frames} frames are made by windows of "
                f"{settings.context_frames}; ask for fewer frames, or choose context=none",
                field="reference",
            )

    def _is_guided(self, settings: GenerationSettings) -> bool:
        return self.family.card.is_guided(max(guidance_scales(settings)))

    def _curve_for(self, settings: GenerationSettings) -> Curve | None:
        return find_curve(self.files) if settings.reuse > 0 else None
