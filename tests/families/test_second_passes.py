"""A second pass of every kind of model against diffusers' own pipeline, which begins later from the same latents."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx import pipeline_ltx_image2video
from PIL import Image

from comfy_tpu.config import GenerationSettings, RuntimeConfig, SecondPass
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.shared.packed_sound import join_sound, split_sound
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia
from comfy_tpu.pipeline.latent_resizing import resize_frames
from comfy_tpu.pipeline.noise import initial_noise, sound_noise
from comfy_tpu.pipeline.second_pass import denoise_again, start_from
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.families import (
    small_animate,
    small_flux2,
    small_hunyuan,
    small_hunyuan_image,
    small_ltx,
    small_ltx2,
    small_qwen_image,
    small_vace,
    wan_pipelines,
)
from tests.families.meshes import MESHES, SINGLE
from tests.families.wan_pipelines import picture

PROMPT, NEGATIVE = "a red circle moving right", "left"
STEPS, SEED = 4, 7
CHOSEN: dict[str, Any] = {
    "num_inference_steps": STEPS,
    "seed": SEED,
    "negative_prompt": NEGATIVE,
    "max_sequence_length": 32,
}
_SIZE: dict[str, Any] = {"height": 96, "width": 96}
_COMMON: dict[str, Any] = {
    "prompt": PROMPT,
    "negative_prompt": NEGATIVE,
    "num_inference_steps": STEPS,
    "output_type": "pt",
}


@contextlib.contextmanager
def beginning_at(pipeline: Any, step: int, sigma: float) -> Iterator[None]:
    """Lets diffusers' pipeline begin at a step, as its video-to-video pipelines tell their schedulers to. `sigma`: the
    noise level that is expected there."""
    own = pipeline.scheduler
    kind = type(own)

    class Later(kind):  # type: ignore[valid-type, misc]
        @functools.wraps(kind.set_timesteps)
        def set_timesteps(self, *given: Any, **more: Any) -> None:
            super().set_timesteps(*given, **more)
            assert abs(float(self.sigmas[step]) - sigma) < 1e-5
            self._begin_index = step
            self._whole = self.timesteps, self.sigmas
            self.timesteps, self.sigmas = self._later = self.timesteps[step:], self.sigmas[step:]

        def step(self, *given: Any, **more: Any) -> Any:
            self.timesteps, self.sigmas = self._whole  # it counts the steps from the first one on
            try:
                return super().step(*given, **more)
            finally:
                self.timesteps, self.sigmas = self._later

        def set_begin_index(self, begin_index: int = 0) -> None:
            assert begin_index == 0

    pipeline.scheduler = Later.from_config(own.config)
    try:
        yield
    finally:
        pipeline.scheduler = own


Made = tuple[torch.Tensor, ...]
"""Frames [1, frames, height, width, 3], and a waveform if there is one."""


@dataclasses.dataclass(frozen=True)
class Case:
    directory: Callable[[], Any]
    run: Callable[[torch.Tensor, dict[str, torch.Tensor]], Made]
    """(first sample [1, channels, frames, height, width], embeddings of given media) -> what diffusers makes."""
    reference: Callable[[], Any]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    given: Callable[[], GivenMedia] = lambda: NO_MEDIA
    side: int = 64
    """Of the first pass; that of the second is 1.5 times as long, to the next that the model takes."""


def _frames(made: Any) -> torch.Tensor:
    return made.frames.permute(0, 1, 3, 4, 2).float()


def _packed(video: torch.Tensor) -> torch.Tensor:
    return video.flatten(2).transpose(1, 2)


def _wan(kind: str, pictures: int = 0) -> Case:
    own = {"guidance_scale_2": 2.5} if kind.startswith("2.2") else {}
    tokens = 512 if kind.startswith("2.1") else 32

    def run(sample: torch.Tensor, embedded: dict[str, torch.Tensor]) -> Made:
        images = dict(zip(("image", "last_image"), map(picture, range(pictures)), strict=False))
        chosen = {**_COMMON, **_SIZE, **own, "num_frames": 9, "guidance_scale": 4.0, "max_sequence_length": tokens}
        return (_frames(wan_pipelines.reference(kind)(**chosen, **images, latents=sample)),)

    return Case(
        lambda: wan_pipelines.directory(kind),
        run,
        lambda: wan_pipelines.reference(kind),
        {"num_frames": 9, "guidance_scale": 4.0, "flow_shift": 3.0, "max_sequence_length": tokens, **own},
        lambda: GivenMedia(tuple(map(picture, range(pictures)))),
    )


def _vace() -> Case:
    def run(sample: torch.Tensor, embedded: dict[str, torch.Tensor]) -> Made:
        chosen = {"prompt": PROMPT, "num_frames": 9, "guidance_scale": 4.0, **CHOSEN}
        inputs = small_vace.diffusers_inputs("everything", (100, 100))
        return (small_vace.run("2.1", 96, 96, chosen, latents=sample, **inputs),)

    return Case(
        lambda: small_vace.directory("2.1"),
        run,
        lambda: small_vace.reference("2.1"),
        {"num_frames": 9, "guidance_scale": 4.0, "flow_shift": 3.0},
        lambda: small_vace.given("everything", size=(100, 100)),
    )


def _hunyuan(images: int) -> Case:
    module = small_hunyuan_image if images else small_hunyuan
    given = (picture(0, 64, 64),) * images

    def run(sample: torch.Tensor, embedded: dict[str, torch.Tensor]) -> Made:
        size = {} if images else _SIZE  # from an image diffusers chooses the size: here 64 × 64
        return (_frames(module.reference()(*given, **{**_COMMON, **size, "num_frames": 5}, latents=sample)),)

    settings = {"num_frames": 5, "max_sequence_length": small_hunyuan.TEXT_TOKENS}
    media = GivenMedia(given)
    return Case(module.directory, run, module.reference, settings, lambda: media, side=48 if images else 64)


def _ltx(images: int) -> Case:
    reference = small_ltx.image_reference if images else small_ltx.reference
    given = (picture(0),) * images

    def run(sample: torch.Tensor, embedded: dict[str, torch.Tensor]) -> Made:
        if images:
            sample = torch.cat((embedded["condition"], sample[:, :, 1:]), dim=2)
        chosen = {**_COMMON, **_SIZE, "num_frames": 9, "max_sequence_length": small_ltx.TEXT_TOKENS}
        return (_frames(reference()(*given, **chosen, latents=_packed(sample))),)

    settings = {"num_frames": 9, "max_sequence_length": small_ltx.TEXT_TOKENS}
    return Case(small_ltx.directory, run, reference, settings, lambda: GivenMedia(given))


def _ltx2(images: int) -> Case:
    reference = small_ltx2.image_reference if images else small_ltx2.reference
    given = (picture(0),) * images

    def run(sample: torch.Tensor, embedded: dict[str, torch.Tensor]) -> Made:
        video, sound = split_sound(sample, 2, SOUND_TOKENS)
        if images:
            video = torch.cat((embedded["condition"], video[:, :, 1:]), dim=2)
        pipeline = reference()
        # In the VAEs' own scales, which diffusers takes.
        vae, shape = pipeline.vae, (1, -1, 1, 1, 1)
        video = video * vae.latents_std.view(shape) / vae.config.scaling_factor + vae.latents_mean.view(shape)
        sound = sound * pipeline.audio_vae.latents_std + pipeline.audio_vae.latents_mean
        made = pipeline(
            *given,
            **{**_COMMON, **_SIZE, "num_frames": 9, "max_sequence_length": small_ltx2.TEXT_TOKENS},
            spatio_temporal_guidance_blocks=[1],
            latents=video,
            audio_latents=sound.unflatten(2, (2, -1)).transpose(1, 2),
        )
        return _frames(made), made.audio

    settings = {"num_frames": 9, "max_sequence_length": small_ltx2.TEXT_TOKENS, "stg_scale": 1.0, "stg_block": 1}
    return Case(small_ltx2.directory, run, reference, settings, lambda: GivenMedia(given))


SOUND_TOKENS = round(9 / 24 * 25)


def _flux2() -> Case:
    given = (picture(1, 96, 64),)

    def run(sample: torch.Tensor, embedded: dict[str, torch.Tensor]) -> Made:
        chosen = {name: value for name, value in _COMMON.items() if name != "negative_prompt"}
        made = small_flux2.reference("dev")(
            **chosen, **_SIZE, image=list(given), guidance_scale=4.0, max_sequence_length=40, latents=sample[:, :, 0]
        )
        return (made.images.permute(0, 2, 3, 1)[:, None],)

    return Case(
        lambda: small_flux2.directory("dev"),
        run,
        lambda: small_flux2.reference("dev"),
        {"guidance_scale": 4.0, "max_sequence_length": 40, "negative_prompt": ""},
        lambda: GivenMedia(given),
    )


def _qwen_image_edit() -> Case:
    given = (picture(1, 100, 75), picture(2, 64, 96))

    def run(sample: torch.Tensor, embedded: dict[str, torch.Tensor]) -> Made:
        pipeline = small_qwen_image.reference("plus")
        packed = pipeline._pack_latents(sample.transpose(1, 2), 1, sample.shape[1], *sample.shape[3:])
        made = pipeline(**_COMMON, **_SIZE, image=list(given), true_cfg_scale=4.0, latents=packed)
        return (made.images.permute(0, 2, 3, 1)[:, None],)

    return Case(
        lambda: small_qwen_image.directory("plus"),
        run,
        lambda: small_qwen_image.reference("plus"),
        {"guidance_scale": 4.0, "max_sequence_length": 40},
        lambda: GivenMedia(given),
    )


CASES: dict[str, Callable[[], Case]] = {
    "Wan 2.2": lambda: _wan("2.2"),
    "Wan 2.2 image-to-video": lambda: _wan("2.2 image", 2),
    "Wan 2.1 image-to-video": lambda: _wan("2.1 image", 1),
    "Wan 2.2 5B": lambda: _wan("5B image", 1),
    "Wan 2.1 VACE": _vace,
    "HunyuanVideo-1.5": lambda: _hunyuan(0),
    "HunyuanVideo-1.5 image-to-video": lambda: _hunyuan(1),
    "LTX-Video": lambda: _ltx(0),
    "LTX-Video from an image": lambda: _ltx(1),
    "LTX-2": lambda: _ltx2(0),
    "LTX-2 from an image": lambda: _ltx2(1),
    "Flux.2": _flux2,
    "Qwen-Image-Edit Plus": _qwen_image_edit,
}


@functools.cache
def opened(name: str, mesh: str) -> VideoPipeline:
    return VideoPipeline.open(CASES[name]().directory(), RuntimeConfig(mesh=mesh))


def first_sample(
    pipeline: VideoPipeline, latents: torch.Tensor, embedded: dict[str, torch.Tensor], sigma: float, larger: Any
) -> torch.Tensor:
    """What the second pass begins with, from random latents of the first."""
    card, families_media = pipeline.family.card, pipeline.family.media
    frames = card.latent_frames(larger)
    resized = resize_frames(latents[:, :, :frames], pipeline.latent_shape(larger)[3:], "latent")
    if card.sound is not None:
        _, sound = split_sound(latents, frames, SOUND_TOKENS)
        noise = sound_noise(tuple(resized.shape), (1, 2, SOUND_TOKENS, 4), SEED)
        return sigma * noise + (1 - sigma) * join_sound(resized, sound)
    if families_media is not None and families_media.frames_from == "control":
        control = embedded["control"]
        references = control[:, : resized.shape[1], : control.shape[2] - frames]
        resized = torch.cat((references, resized), dim=2)
    return sigma * initial_noise(tuple(resized.shape), SEED) + (1 - sigma) * resized


def of_both(name: str, mesh: str, strength: float = 0.5) -> tuple[Made, Made]:
    """What we make, and what diffusers does."""
    case, pipeline = CASES[name](), opened(name, mesh)
    card, given = pipeline.family.card, case.given()
    first: GenerationSettings = pipeline.settings(
        **{**CHOSEN, **case.settings, "height": case.side, "width": case.side}
    )
    embeddings = pipeline.encode(PROMPT, first, given)
    latents = torch.randn(pipeline.latent_shape(first), generator=torch.Generator().manual_seed(1))
    if card.sound is not None:
        latents = join_sound(*split_sound(latents, card.latent_frames(first), SOUND_TOKENS))  # zeros behind the sound
    made, larger = denoise_again(pipeline, embeddings, latents, first, SecondPass(1.5, strength), given)
    waveform = pipeline.decode_sound(made, larger)
    found = (
        torch.cat(list(pipeline.decode(made, larger)), dim=1),
        *(() if waveform is None else (waveform.samples,)),
    )
    sigma = pipeline.plan(larger, strength).steps[0].sigma
    embedded = pipeline.encode_media(given, larger) if given else {}
    sample = first_sample(pipeline, latents, embedded, sigma, larger)
    with beginning_at(case.reference(), STEPS - int(STEPS * strength), sigma):
        return found, case.run(sample, embedded)


def closeness(found: Made, wanted: Made) -> float:
    """The least dB of frames and sound, which ends with the frames here."""
    return min(
        psnr(one[..., : other.shape[-1]], other[..., : one.shape[-1]]) for one, other in zip(found, wanted, strict=True)
    )


BY_DEFAULT = (("Wan 2.1 VACE", "dp=2,sp=4"), ("LTX-2 from an image", "dp=2,sp=4"))
"""References in front of the video, and a sound behind it."""


def _case(name: str, mesh: str) -> Any:
    mark = pytest.mark.thorough if mesh == SINGLE else pytest.mark.slow
    return pytest.param(name, mesh, marks=[] if (name, mesh) in BY_DEFAULT else [mark])


@pytest.fixture
def first_frames_are_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """LTX-Video's, of which diffusers draws a sample."""
    retrieve = pipeline_ltx_image2video.retrieve_latents
    monkeypatch.setattr(
        pipeline_ltx_image2video, "retrieve_latents", lambda output, generator: retrieve(output, generator, "argmax")
    )


@pytest.mark.usefixtures("first_frames_are_means", "reduced_areas")
@pytest.mark.parametrize(("name", "mesh"), list(itertools.starmap(_case, itertools.product(CASES, MESHES))))
def test_a_second_pass_is_that_of_diffusers(name: str, mesh: str) -> None:
    found, wanted = of_both(name, mesh)
    assert min(part.std() for part in wanted) > 0.02, "the reference shows and plays something"
    assert closeness(found, wanted) >= SAME


@pytest.mark.thorough
def test_another_strength_would_be_seen() -> None:
    (found, _), (_, other) = (of_both("Wan 2.2 5B", SINGLE, strength) for strength in (0.5, 0.75))
    assert closeness(found, other) < SAME - 40


def _wan_latents(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    vae = pipeline.vae
    mean, deviation = (
        torch.tensor(of).view(1, -1, 1, 1, 1) for of in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (vae.encode(pixels).latent_dist.mode() - mean) / deviation


def _ltx_latents(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    vae = pipeline.vae
    return pipeline._normalize_latents(vae.encode(pixels).latent_dist.mode(), vae.latents_mean, vae.latents_std)


BY_DIFFUSERS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "Wan 2.2": _wan_latents,
    "Wan 2.2 5B": _wan_latents,
    "LTX-Video": _ltx_latents,
    "LTX-2": _ltx_latents,
    "Flux.2": lambda pipeline, pixels: pipeline._encode_vae_image(pixels[:, :, 0], None)[:, :, None],
    "Qwen-Image-Edit Plus": lambda pipeline, pixels: pipeline._encode_vae_image(pixels, None),
}


@pytest.mark.default_cases("LTX-2")
@pytest.mark.parametrize("name", BY_DIFFUSERS)
def test_a_whole_result_is_encoded_as_by_diffusers(name: str) -> None:
    """For a second pass by pixels, which resizes it."""
    case, pipeline = CASES[name](), opened(name, SINGLE)
    settings = pipeline.settings(**{**case.settings, **_SIZE})
    given = [picture(number, 70, 50) for number in range(settings.num_frames)]
    found = pipeline.encode_frames(np.stack([np.asarray(each) for each in given]), settings)
    resized = np.stack([np.asarray(each.resize((96, 96), Image.Resampling.LANCZOS)) for each in given])
    with torch.no_grad():
        wanted = BY_DIFFUSERS[name](case.reference(), torch.from_numpy(resized).permute(3, 0, 1, 2)[None] / 127.5 - 1)
    assert psnr(found, wanted, span=float(wanted.std())) >= SAME


def test_a_long_video_from_latents_has_the_windows_of_one_from_a_prompt() -> None:
    """Of a model that continues videos from images: latents to start from are no image."""
    pipeline = opened("Wan 2.2 5B", SINGLE)
    chosen: dict[str, Any] = {**CHOSEN, "height": 64, "width": 64, "num_frames": 25, "context_frames": 9}
    auto, static = (pipeline.settings(**chosen, context=context) for context in ("auto", "static"))
    begun = torch.randn(pipeline.latent_shape(auto), generator=torch.Generator().manual_seed(1))
    embeddings = start_from(pipeline.encode_text(PROMPT, auto), begun, 0.5)
    made = pipeline.denoise(embeddings, auto)
    assert torch.equal(made, pipeline.denoise(embeddings, static))
    whole = dataclasses.replace(auto, context="none")
    assert not torch.allclose(made, pipeline.denoise(embeddings, whole), atol=1e-2)
    with pytest.raises(InvalidValueError, match="continued every 9, and starts from no latents; ask for 9 frames at"):
        pipeline.denoise(start_from(pipeline.encode(PROMPT, auto, [picture(0)]), begun, 0.5), auto)


@pytest.mark.thorough
def test_a_video_that_is_made_in_segments_starts_from_no_latents() -> None:
    pipeline = VideoPipeline.open(small_animate.directory(), RuntimeConfig(mesh=SINGLE))
    settings = pipeline.settings(**CHOSEN, height=64, width=64)
    begun = torch.zeros(pipeline.latent_shape(settings))
    embeddings = start_from(pipeline.encode_text(PROMPT, settings), begun, 0.5)
    with pytest.raises(InvalidValueError, match="makes videos segment by segment, and starts from no latents, ima"):
        pipeline.denoise(embeddings, settings)
