"""The stages of a pipeline, as `VideoPipeline` has them, on a server."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings, Lora
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.families.card import Limits, ModelCard, Preset
from comfy_tpu.families.context import settle_context
from comfy_tpu.families.presets import Recognition, make_choice, recognise_file
from comfy_tpu.families.registry import model_cards
from comfy_tpu.families.settings import make_settings, settings_of_latents
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia, as_given
from comfy_tpu.pipeline.latent_scale import from_vae_scale, to_vae_scale
from comfy_tpu.pipeline.preview_colours import PreviewColours
from comfy_tpu.pipeline.preview_images import ColourPreviews, Previews
from comfy_tpu.pipeline.progress import Progress, ProgressCallback
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.stage_messages import (
    StageMessage,
    embedding_tensors,
    media_tensors,
    pack,
    pack_settings,
    read_embeddings,
    unpack,
)
from comfy_tpu.remote.client import RefusedError, ServerClient
from comfy_tpu.remote.runner import STAGES_PATH, WAIT_SECONDS, Callbacks, StageRunner

logger = logging.getLogger(__name__)

_RESULT_BYTES_MAX = 2**30
_SETTINGS = frozenset(field.name for field in dataclasses.fields(GenerationSettings))


@dataclasses.dataclass(frozen=True)
class RemoteModel:
    """What a server says of a model."""

    name: str
    fingerprint: str
    card: ModelCard
    defaults: GenerationSettings
    transformers: int
    latent_channels: int
    latent_statistics: tuple[list[float], list[float]]
    embedding_shapes: Mapping[str, tuple[int, ...]]
    preview_colours: PreviewColours | None
    presets: Mapping[str, Preset] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any], server: object) -> RemoteModel:
        family = given.get("family")
        card = next((each for each in model_cards() if each.name == family), None)
        if card is None:
            raise InvalidValueError(
                f"server={server} has a model of the family {str(family)[:60]!r}, which is not known here; install the "
                "same version of comfy-tpu on both sides"
            )
        try:
            channels = int(given["latent_channels"])
            mean, deviation = ([float(value) for value in values] for values in given["latent_statistics"])
            shapes = {str(name): tuple(map(int, shape)) for name, shape in given["embedding_shapes"].items()}
            defaults = given["defaults"]
            if (
                set(defaults) != _SETTINGS
                or [len(mean), len(deviation)] != [channels, channels]
                or "text" not in shapes
            ):
                raise ValueError("it differs")
            if not all(map(math.isfinite, (*mean, *deviation))) or not all(deviation):
                raise ValueError("a statistic is no number")
            settings = make_settings(GenerationSettings(**defaults), {}, card.limits)
            colours = given.get("preview_colours")
            return cls(
                str(given["id"]),
                str(given["fingerprint"]),
                card,
                settings,
                int(given["transformers"]),
                channels,
                (mean, deviation),
                shapes,
                None if colours is None else PreviewColours.read(colours, channels, "the server's preview.json"),
                {str(name): _read_preset(each, settings, card) for name, each in given["presets"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
            raise RefusedError(
                f"server={server} describes its models in another way ({type(error).__name__}); install the same "
                "version of comfy-tpu on both sides",
                200,
            ) from error


def _read_preset(given: Mapping[str, Any], defaults: GenerationSettings, card: ModelCard) -> Preset:
    """Patterns are those of the card here: a server's would run in this process."""
    make_settings(defaults, given["settings"], card.limits)
    known = next((each for each in card.presets.values() if each.settings == given["settings"]), Preset({}))
    return dataclasses.replace(
        known,
        settings=dict(given["settings"]),
        lora=str(given["lora"]),
        is_distilled=bool(given["is_distilled"]),
    )


class RemotePipeline:
    """One model of a server. Its methods are those of `VideoPipeline`, with the same results."""

    def __init__(
        self,
        client: ServerClient,
        model: RemoteModel,
        callbacks: Callbacks,
        *,
        loras: Sequence[Lora] = (),
        preset: str | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.model, self.callbacks, self.loras = model, callbacks, tuple(loras)
        self.preset = make_choice(model.presets, _recognise(loras, model.presets), preset, model.name)
        self._runner = StageRunner(client, callbacks, wait_seconds=wait_seconds)
        self.defaults = model.defaults

    @classmethod
    def open(
        cls,
        client: ServerClient,
        name: str,
        callbacks: Callbacks | None = None,
        *,
        loras: Sequence[Lora] = (),
        preset: str | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> RemotePipeline:
        """Asks the server for its models. Raises InvalidValueError where none of them is `name`."""
        callbacks = callbacks or Callbacks()
        answer = StageRunner(client, callbacks, wait_seconds=wait_seconds).ask(f"{STAGES_PATH}/models")
        listed = answer.get("data")
        models = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        model = RemoteModel.read(_choose(models, name, client), client.address)
        return cls(client, model, callbacks, loras=loras, preset=preset, wait_seconds=wait_seconds)

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def model_fingerprint(self) -> str:
        return self.model.fingerprint

    @property
    def card(self) -> ModelCard:
        return self.model.card

    @property
    def limits(self) -> Limits:
        return self.card.limits

    @property
    def latent_channels(self) -> int:
        return self.model.latent_channels

    @property
    def has_two_transformers(self) -> bool:
        return self.model.transformers > 1

    @property
    def previews(self) -> Previews | None:
        return None if self.model.preview_colours is None else ColourPreviews(self.model.preview_colours)

    @property
    def on_progress(self) -> ProgressCallback:
        return self.callbacks.on_progress

    def settings(self, **chosen: Any) -> GenerationSettings:
        return make_settings(self.defaults, chosen, self.limits)

    def settle_context(self, settings: GenerationSettings, images: Sequence[Any]) -> GenerationSettings:
        return settle_context(self.model.card, settings, images)

    def warn_of_ignored(self, settings: GenerationSettings) -> None:
        """Nothing: the server warns."""

    def warn_of_preset(self, settings: GenerationSettings) -> None:
        has_branches = self.model.card.guidance == "classifier_free"
        for field, sentence in self.preset.warnings(settings, has_branches=has_branches):
            logger.warning("%s", sentence, extra={"field": field})

    def embedding_shapes(self, settings: GenerationSettings) -> Mapping[str, tuple[int, ...]]:
        """Those of the text; those of images depend on the settings, and the server checks them."""
        return self.model.embedding_shapes

    def latent_settings(self, latents: torch.Tensor, **chosen: Any) -> GenerationSettings:
        shape = tuple(latents.shape)
        return settings_of_latents(shape, self.model.latent_channels, self.model.card, self.defaults, chosen)

    def encode_text(
        self, prompt: str, settings: GenerationSettings, images: Sequence[Image.Image] = ()
    ) -> PromptEmbeddings:
        """`images`: those that the model's text encoder sees."""
        if images:
            return dataclasses.replace(self.encode(prompt, settings, images), shared={})
        return read_embeddings(self._run("encode", {}, settings, {"prompt": prompt}))

    def encode_media(
        self, given: GivenMedia | Sequence[Image.Image], settings: GenerationSettings
    ) -> dict[str, torch.Tensor]:
        return dict(self._encode(given, settings, {}).shared)

    def encode(
        self, prompt: str, settings: GenerationSettings, given: GivenMedia | Sequence[Image.Image] = NO_MEDIA
    ) -> PromptEmbeddings:
        return self._encode(given, settings, {"prompt": prompt})

    def _encode(
        self, given: GivenMedia | Sequence[Image.Image], settings: GenerationSettings, described: Mapping[str, str]
    ) -> PromptEmbeddings:
        tensors, strengths = media_tensors(as_given(given), self.model.card, settings)
        return read_embeddings(self._run("encode", tensors, settings, {**described, **strengths, "media": "true"}))

    def denoise(self, embeddings: PromptEmbeddings, settings: GenerationSettings) -> torch.Tensor:
        tensors, described = embedding_tensors(embeddings)
        if self.loras:
            described["lora"] = json.dumps([_describe_lora(lora) for lora in self.loras], ensure_ascii=False)
        if self.preset.name is not None:
            described["preset"] = self.preset.name
        return _latents(self._run("denoise", tensors, settings, described))

    def decode(self, latents: torch.Tensor, settings: GenerationSettings) -> Iterator[torch.Tensor]:
        frames = self._run("decode", {"latents": latents}, settings, {}, _frames_bytes(settings)).tensors.get("frames")
        shape = (settings.num_videos, settings.num_frames, settings.height, settings.width, 3)
        if frames is None or tuple(frames.shape) != shape or frames.dtype != torch.float32:
            raise RefusedError("the server's frames have another shape; queue the prompt again", 200)
        return iter([frames])

    def decode_sound(self, latents: torch.Tensor, settings: GenerationSettings) -> Waveform | None:
        if self.model.card.sound is None:
            return None
        made = self._run("decode_sound", {"latents": latents}, settings, {})
        samples, rate = made.tensors.get("sound"), made.metadata.get("sample_rate", "")
        if samples is None or samples.ndim != 3 or samples.shape[0] != settings.num_videos or not rate.isdecimal():
            raise RefusedError("the server's sound has another shape; queue the prompt again", 200)
        return Waveform(samples.float(), int(rate))

    def to_vae_scale(self, latents: torch.Tensor) -> torch.Tensor:
        return to_vae_scale(latents, self.model.latent_statistics)

    def from_vae_scale(self, latents: torch.Tensor) -> torch.Tensor:
        return from_vae_scale(latents, self.model.latent_statistics)

    def _run(
        self,
        stage: str,
        tensors: Mapping[str, torch.Tensor],
        settings: GenerationSettings,
        described: Mapping[str, str],
        most_bytes: int = _RESULT_BYTES_MAX,
    ) -> StageMessage:
        metadata = {
            "model": self.model.name,
            "model_fingerprint": self.model.fingerprint,
            "settings": pack_settings(settings),
            **described,
        }
        size = f"{settings.width}×{settings.height}×{settings.num_frames}"
        end = {
            "encode": Progress("encoding", "prompt" if "prompt" in described else "image", 1, 1),
            "denoise": Progress("denoising", "", settings.num_inference_steps, settings.num_inference_steps, size=size),
            "decode": Progress("decoding", "", self._latent_frames(settings), self._latent_frames(settings), size=size),
            "decode_sound": Progress("decoding", "sound", 1, 1, size=size),
        }[stage]
        if stage == "denoise" and self.callbacks.read_preview is not None:
            metadata["preview"] = "true"
        return unpack(self._runner.run(stage, pack(tensors, metadata), most_bytes, end))

    def _latent_frames(self, settings: GenerationSettings) -> int:
        return (settings.num_frames - 1) // self.model.card.temporal_scale + 1


def _recognise(loras: Sequence[Lora], presets: Mapping[str, Preset]) -> Iterator[Recognition]:
    """By the names of the files, which are at the client too."""
    for lora in loras:
        if lora.strength and (name := recognise_file(lora.path, {}, presets)) is not None:
            yield Recognition("lora", str(lora.path), name, lora.strength)


def read_preview(content: bytes) -> torch.Tensor:
    """Latents [1, channels, frames, height, width]."""
    return _latents(unpack(content)).float()


def _latents(message: StageMessage) -> torch.Tensor:
    latents = message.tensors.get("latents")
    if latents is None or latents.ndim != 5:
        raise RefusedError("the server's result holds no latents; queue the prompt again", 200)
    return latents


def _frames_bytes(settings: GenerationSettings) -> int:
    pixels = settings.num_videos * settings.num_frames * settings.height * settings.width
    return 4 * 3 * pixels + 2**20


def _choose(models: Sequence[Mapping[str, Any]], name: str, client: ServerClient) -> Mapping[str, Any]:
    """The model of this name: by itself, or by its last part, which a directory and a hub id have in common."""
    exact = [each for each in models if each.get("id") == name]
    short = [each for each in models if _last_part(str(each.get("id"))) == _last_part(name)]
    for found in (exact, short):
        if len(found) == 1:
            return found[0]
    names = ", ".join(str(each.get("id"))[:80] for each in models) or "nothing"
    raise InvalidValueError(
        f"model_id={name} is not served by {client.address}, which has {names}; choose one of them, or start the "
        f"server with `comfy-tpu serve {name}`",
        field="model_id",
    )


def _last_part(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2]


def _describe_lora(lora: Lora) -> dict[str, Any]:
    found = lora.path.stat()
    digest = _hash(lora.path, found.st_size, found.st_mtime_ns)
    return {"name": lora.path.name, "strength": lora.strength, "noise": lora.noise, "sha256": digest}


@functools.lru_cache(maxsize=64)
def _hash(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
