"""LTX-2 against diffusers' own pipelines: whole videos with their sound, guidance, first frames, files."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.cli import main as cli
from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.component import Component
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import InvalidValueError, UnsupportedError
from comfy_tpu.facade import Pipeline, Video
from comfy_tpu.families.ltx2 import text as ltx2_text
from comfy_tpu.families.ltx2 import vae as ltx2_vae
from comfy_tpu.families.ltx2.sound import SOUND
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.stages import run_stage
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.stage_messages import pack, pack_settings, unpack
from comfy_tpu.pipeline.video import VideoPipeline
from tests.closeness import SAME, psnr
from tests.families import small_ltx2
from tests.families.meshes import AUTO, on_every_mesh

LONG, SHORT = "a red circle moving left on a black background", "blue"
SIZES = {"96x64x17": (LONG, 96, 64, 17), "64x64x9": (SHORT, 64, 64, 9)}
NEGATIVE = "left"
BLOCK = 1


@functools.cache
def opened(mesh: str) -> VideoPipeline:
    return VideoPipeline.open(small_ltx2.directory(), RuntimeConfig(mesh=mesh))


def settings(pipeline: VideoPipeline, size: str, **changed: Any) -> Any:
    _, width, height, frames = SIZES[size]
    chosen = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": 2, "seed": 7}
    chosen |= {"negative_prompt": NEGATIVE, "max_sequence_length": small_ltx2.TEXT_TOKENS}
    return pipeline.settings(**(chosen | {"stg_scale": 1.0, "stg_block": BLOCK} | changed))


Made = tuple[torch.Tensor, torch.Tensor]


def made(pipeline: VideoPipeline, size: str, images: Any = (), **changed: Any) -> Made:
    """Frames, and the waveform of all videos."""
    chosen = settings(pipeline, size, **changed)
    latents = pipeline.denoise(pipeline.encode(SIZES[size][0], chosen, images), chosen)
    sound = pipeline.decode_sound(latents, chosen)
    assert sound is not None
    return torch.cat(list(pipeline.decode(latents, chosen)), dim=1), sound.samples


def by_diffusers(size: str, pipeline: Any = None, **changed: Any) -> Made:
    prompt, width, height, frames = SIZES[size]
    found = (pipeline or small_ltx2.reference())(
        **{
            "prompt": prompt,
            "negative_prompt": NEGATIVE,
            "height": height,
            "width": width,
            "num_frames": frames,
            "num_inference_steps": 2,
            "max_sequence_length": small_ltx2.TEXT_TOKENS,
            "spatio_temporal_guidance_blocks": [BLOCK],
            "generator": torch.Generator().manual_seed(7),
            "output_type": "pt",
            **changed,
        }
    )
    return found.frames.permute(0, 1, 3, 4, 2), found.audio


expected = functools.cache(by_diffusers)


def closeness(one: Made, other: Made) -> tuple[float, float]:
    """dB of the frames, and of the sound, which ends with the frames here."""
    count = min(one[1].shape[2], other[1].shape[2])
    return psnr(one[0], other[0]), psnr(one[1][..., :count], other[1][..., :count])


@on_every_mesh("size", SIZES)
def test_video_and_sound_are_those_of_diffusers_on_every_mesh(mesh: str, size: str) -> None:
    assert min(part.std() for part in expected(size)) > 0.05, "the reference shows and plays something"
    assert min(closeness(made(opened(mesh), size), expected(size))) >= SAME


@pytest.mark.slow
@pytest.mark.parametrize("mesh", AUTO["LTX-2"])
def test_the_video_on_what_auto_takes(mesh: str) -> None:
    assert min(closeness(made(opened(mesh), "64x64x9"), expected("64x64x9"))) >= SAME


BRANCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompts": ({"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}, {"audio_guidance_scale": 2.0}),
    "perturbed": ({"stg_scale": 0.7, "modality_scale": 1.0}, {"audio_stg_scale": 1.4}),
    "isolated": ({"stg_scale": 0.0, "modality_scale": 2.5}, {"audio_modality_scale": 4.0}),
    "rescaled": ({"guidance_rescale": 0.3}, {"audio_guidance_rescale": 0.9}),
}
"""Scales of the video, and of the sound, whose others are the video's."""
_SAME_AS_VIDEO = ("audio_stg_scale", "audio_modality_scale", "audio_guidance_rescale")


@pytest.mark.slow
@pytest.mark.parametrize("branches", BRANCHES)
def test_each_branch_of_guidance(branches: str) -> None:
    of_video, of_sound = BRANCHES[branches]
    chosen = {"guidance_scale": 2.0, "audio_guidance_scale": 2.0} | of_video | of_sound
    same = dict.fromkeys(_SAME_AS_VIDEO)
    wanted = by_diffusers(
        "64x64x9", **{"stg_scale": 1.0, "modality_scale": 3.0, "guidance_rescale": 0.7} | same | chosen
    )
    found = made(opened("single"), "64x64x9", **chosen)
    assert min(closeness(found, wanted)) >= SAME
    assert max(closeness(found, expected("64x64x9"))) < SAME - 30, "which the comparison would see"


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 70, 3), dtype=np.uint8))


@pytest.mark.thorough  # by default: that of LTX-Video, test_ltx.py
@pytest.mark.parametrize(
    ("mesh", "size"),
    [
        ("dp=2,sp=4", "64x64x9"),
        pytest.param("dp=2,tp=4", "64x64x9", marks=pytest.mark.slow),
        pytest.param("single", "96x64x17", marks=pytest.mark.slow),
    ],
)
def test_a_video_from_a_first_frame_is_that_of_diffusers(mesh: str, size: str) -> None:
    wanted = by_diffusers(size, small_ltx2.image_reference(), image=picture())
    assert min(closeness(made(opened(mesh), size, [picture()]), wanted)) >= SAME
    assert max(closeness(wanted, expected(size))) < 60, "the image has an effect, also on the sound"


def test_one_compilation_for_every_prompt_and_scale_of_a_size() -> None:
    pipeline, size = opened("dp=2,sp=4"), "64x64x9"
    made(pipeline, size)
    with count_compilations() as count:
        other = made(pipeline, size, seed=8, negative_prompt="", stg_block=2, audio_guidance_scale=4.0, flow_shift=2.0)
    assert count.requested == 0
    assert max(closeness(other, expected(size))) < 60


@pytest.mark.thorough  # by default: the stage of a server, below, and tests/pipeline/test_sound.py
def test_stages_write_one_file_with_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """encode, denoise and decode, each from the file before it, as the command line runs them."""
    prompt, width, height, frames = SIZES["64x64x9"]
    text, latents, larger = (str(tmp_path / f"{name}.safetensors") for name in ("text", "latents", "larger"))
    video = str(tmp_path / "video.mp4")
    options = ["--model", str(small_ltx2.directory()), "--platform", "cpu", "--mesh", "dp=2,sp=4"]
    sizes = ["--width", str(width), "--height", str(height), "--num-frames", str(frames), "--steps", "2", "--seed", "7"]
    sizes += ["--stg-scale", "1", "--stg-block", str(BLOCK)]
    tokens = {"max_sequence_length": small_ltx2.TEXT_TOKENS}
    (small_ltx2.directory() / "generation.json").write_text(json.dumps(tokens))
    try:
        for argv in (
            ["encode", prompt, "-o", text, "--negative-prompt", NEGATIVE, *sizes, *options],
            ["denoise", text, "-o", latents, *options],
            ["decode", latents, "-o", video, *options],
            ["upscale", latents, "--scale", "2", "-o", larger, *options],
        ):
            assert cli.main(argv) == 0, capsys.readouterr().err
        assert cli.main(["denoise", text, "--latents", larger, "--fps", "12", "-o", latents, *options]) == 1
        assert "--fps 12 is not that of the latents, 24, whose sound is as long as" in capsys.readouterr().err
    finally:
        (small_ltx2.directory() / "generation.json").unlink()
    with av.open(video) as container:
        sounds = list(container.decode(audio=0))
        stream = container.streams.audio[0]
        assert (stream.codec_context.name, stream.channels, sounds[0].sample_rate) == ("aac", 2, 8000)
    with av.open(video) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(shown) == frames
    heard = np.concatenate([sound.to_ndarray() for sound in sounds], axis=1)
    assert abs(heard.shape[1] / 8000 - frames / 24) < 1024 / 8000, "up to the last frame of AAC"
    assert np.abs(heard).max() > 0.1
    weights = torch.tensor([0.2126, 0.7152, 0.0722])  # 4:2:0 keeps the brightness of noise, and not its colours
    brightness = torch.from_numpy(np.stack(shown)) / 255 @ weights, expected("64x64x9")[0][0] @ weights
    assert psnr(*brightness) > 30, "the picture of the prompt; another one has less than 20"


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"height": 80}, "height=80 is not divisible by 32; use 64 or 96"),
        ({"width": 32}, "width=32 is outside 64 to 4096"),
        ({"num_frames": 13}, r"num_frames=13 is not 8n\+1; use 9 or 17"),
        ({"stg_block": 48}, "stg_block=48 is not allowed; give a whole number from 0 to 47"),
        ({"modality_scale": -1.0}, "modality_scale=-1.0 is not a number from 0 to 100"),
        ({"audio_guidance_rescale": 2.0}, "audio_guidance_rescale=2.0 is not a number from 0 to 1"),
        ({"max_sequence_length": 100}, "max_sequence_length=100 is not divisible by 128; use 128"),
    ],
)
def test_bad_settings(chosen: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        settings(opened("dp=2,sp=4"), "64x64x9", **chosen)


def test_long_videos_of_silent_models_are_refused() -> None:
    pipeline = opened("dp=2,sp=4")
    chosen = settings(pipeline, "64x64x9", context="static", num_frames=249)
    with pytest.raises(InvalidValueError, match="context=static is for silent videos, and .* makes sound with them"):
        pipeline.encode(SHORT, chosen)


def test_an_image_of_one_row_is_refused() -> None:
    pipeline = opened("dp=2,sp=4")
    with pytest.raises(InvalidValueError, match="image is 70×1, expected two pixels on a side at least"):
        pipeline.encode(SHORT, settings(pipeline, "64x64x9"), [picture().resize((70, 1))])


def test_settings_of_sound_are_named_where_they_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    demo = VideoPipeline.open("demo", RuntimeConfig(mesh="single"))
    demo.warn_of_ignored(demo.settings(audio_guidance_scale=3.0))
    assert "audio_guidance_scale=3.0 has no effect: Wan 2.1" in caplog.text
    assert "makes no sound" in caplog.text


@pytest.mark.parametrize(
    ("spec", "config", "text"),
    [
        (
            ltx2_vae.VAE,
            small_ltx2.VAE | {"timestep_conditioning": True},
            "takes noise away or adds it",
        ),
        (SOUND.vae, small_ltx2.AUDIO_VAE | {"mel_hop_length": 80}, "has 50 latents per second .*published 25"),
        (
            ltx2_text.CONNECTORS,
            small_ltx2.CONNECTORS | {"video_connector_num_learnable_registers": 64},
            "have 64 and 128 registers",
        ),
    ],
    ids=["vae", "audio_vae", "connectors"],
)
def test_what_is_not_understood_is_refused(spec: Any, config: Any, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        Component(spec, config, make_placement("single"), dtype=torch.float32)


def test_the_stage_of_a_server_returns_the_sound(tmp_path: Path) -> None:
    """As a client sends latents and reads the waveform."""
    pipeline = opened("dp=2,sp=4")
    chosen = settings(pipeline, "64x64x9")
    latents = pipeline.denoise(pipeline.encode(SHORT, chosen), chosen)
    given = tmp_path / "input"
    given.write_bytes(pack({"latents": latents}, {"settings": pack_settings(chosen)}))
    run_stage(pipeline, {"stage": "decode_sound", "input": str(given)}, Folder(str(tmp_path)), "sound.safetensors")
    message = unpack((tmp_path / "sound.safetensors").read_bytes())
    assert message.metadata["sample_rate"] == "8000"
    assert psnr(message.tensors["sound"], made(pipeline, "64x64x9")[1]) >= SAME
    assert message.tensors["sound"].shape == (1, 2, 3000), "nine frames of a twenty-fourth of a second"


def test_python_gets_the_sound_with_the_frames(tmp_path: Path) -> None:
    pipeline = opened("dp=2,sp=4")
    chosen = dataclasses.asdict(settings(pipeline, "64x64x9"))
    video = Pipeline(pipeline)(SHORT, **chosen)
    assert isinstance(video, Video)
    assert video.sound is not None
    assert (video.sound.shape, video.sample_rate, len(video)) == ((2, 3000), 8000, 9)
    with av.open(str(video.save(tmp_path / "video.mp4"))) as container:
        assert [stream.type for stream in container.streams] == ["video", "audio"]
