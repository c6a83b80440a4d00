"""Sound in video files, read back; and latents that hold it."""

import dataclasses
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.ltx2 import card
from comfy_tpu.families.settings import settings_of_latents
from comfy_tpu.families.shared.packed_sound import join_sound, split_sound
from comfy_tpu.pipeline import media, sound_files
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.video_files import open_video
from tests.pipeline.clips import write_flash

FPS, RATE, FRAMES = 24, 24000, 48


def click(seconds: float, channels: int = 2) -> Waveform:
    """Silence with a hundredth of a second of sound, as long as the frames."""
    samples = torch.zeros(1, channels, FRAMES * RATE // FPS)
    begin = round(seconds * RATE)
    samples[..., begin : begin + RATE // 100] = 0.9 * torch.sin(torch.arange(RATE // 100) * 0.8)
    return Waveform(samples, RATE)


def flash(frame: int) -> torch.Tensor:
    frames = torch.zeros(FRAMES, 32, 48, 3)
    frames[frame:] = 1.0
    return frames


def read(path: Path) -> tuple[np.ndarray, float, np.ndarray, int, float]:
    """Brightness of each frame, the first one's second; samples, their rate, and the first one's second."""
    with av.open(str(path)) as container:
        decoded = list(container.decode(video=0))
    with av.open(str(path)) as container:
        sounds = list(container.decode(audio=0))
    brightness = np.array([frame.to_ndarray(format="rgb24").mean() for frame in decoded])
    samples = np.concatenate([sound.to_ndarray() for sound in sounds], axis=1)
    return brightness, float(decoded[0].time), samples, sounds[0].sample_rate, float(sounds[0].time)


@pytest.mark.parametrize("frame", [5, 24, 43])
def test_sound_and_picture_are_in_step(frame: int, tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    with media.open_writer(path, fps=FPS, metadata={"prompt": "a flash"}, sound=click(frame / FPS)) as writer:
        writer.write(flash(frame))
    brightness, video_start, samples, rate, sound_start = read(path)
    seen = video_start + float(np.argmax(brightness > 128)) / FPS
    heard = sound_start + float(np.argmax(np.abs(samples).max(axis=0) > 0.3)) / rate
    assert rate == RATE
    assert len(samples) == 2
    assert abs(heard - seen) < 0.25 / FPS, "a quarter of a frame; 2 ms are found"
    assert len(brightness) == FRAMES
    assert abs(samples.shape[1] / rate - FRAMES / FPS) < 1 / FPS
    assert media.read_metadata(path)["prompt"] == "a flash"


def test_one_channel_and_several_videos(tmp_path: Path) -> None:
    paths = media.output_paths(tmp_path / "video.mp4", 2)
    both = Waveform(torch.cat((click(0.25, 1).samples, click(1.5, 1).samples)), RATE)
    chunks = [torch.stack((flash(6), flash(36)))]
    media.write_videos(paths, chunks, fps=FPS, metadata=[{}, {}], sound=both)
    for path, wanted in zip(paths, (0.25, 1.5), strict=True):
        _, _, samples, rate, start = read(path)
        assert len(samples) == 1
        assert abs(start + np.argmax(np.abs(samples[0]) > 0.3) / rate - wanted) < 0.01


def test_a_format_without_sound_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        media.open_writer(tmp_path / "video.gif", fps=FPS, metadata={}, sound=click(0.5)) as writer,
    ):
        writer.write(flash(12))
    assert "video.gif is written without the video's sound; write video.mp4 to have it" in caplog.text


def test_a_sound_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is read as a whole."""
    path = tmp_path / "x.mp4"
    media.write_videos(
        [path], iter([torch.zeros(1, FRAMES, 32, 32, 3)]), fps=FPS, metadata=[{}], sheet=None, sound=click(1.0)
    )
    whole = sound_files.read_sound(path, "video")
    assert whole is not None
    monkeypatch.setattr(sound_files, "_SAMPLES_MAX", whole.samples.numel())
    assert sound_files.read_sound(path, "video") is not None
    monkeypatch.setattr(sound_files, "_SAMPLES_MAX", 2 * 60 * RATE // 50)
    with pytest.raises(InvalidValueError, match=r"video=.*x.mp4 has a sound of more than 0 minutes, .*cut a piece out"):
        sound_files.read_sound(path, "video")


def heard_and_seen(path: Path) -> tuple[float, float]:
    """When the click and the flash begin, as they are read."""
    source = open_video(path, "video")
    sound = sound_files.read_sound(path, "video", begin=source.begin, seconds=source.seconds)
    assert sound is not None
    heard = float((sound.samples[0, 0].abs() > 0.3).float().argmax()) / sound.rate
    brightness = np.array([np.asarray(frame).mean() for frame in source.frames(10)])
    return heard, float(np.argmax(brightness > 128)) / 10


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("x.mkv", {}, 1.5),
        ("x.mp4", {}, 1.5),
        ("x.mkv", {"sound_begin": 1.0}, 1.5),
        ("x.mp4", {"sound_begin": 1.0}, 1.5),
        ("x.mkv", {"video_begin": 0.5}, 1.0),
        ("x.mp4", {"video_begin": 0.5}, 1.0),
        ("x.mkv", {"video_begin": 0.5, "sound_begin": 0.8}, 1.0),
        ("x.mkv", {"missing": (0.3, 0.5)}, 1.5),
        ("x.mkv", {"missing": (0.3, 0.32)}, 1.5),
    ],
)
def test_a_sound_that_is_read_keeps_its_time(name: str, changes: Any, expected: float, tmp_path: Path) -> None:
    heard, seen = heard_and_seen(write_flash(tmp_path / name, **changes))
    assert seen == expected
    assert abs(heard - expected) < 0.005


def test_a_sound_ends_with_the_pictures(tmp_path: Path) -> None:
    path = write_flash(tmp_path / "x.mkv")
    for seconds, expected in ((1.6, 12800), (5.0, 16000)):
        sound = sound_files.read_sound(path, "video", seconds=seconds)
        assert sound is not None
        assert sound.samples.shape[2] == expected
    assert sound_files.read_sound(path, "video", begin=9.0) is None, "it is over before the first picture"


def test_silence_counts_as_sound_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_flash(tmp_path / "x.mkv", sound_begin=1.0)
    monkeypatch.setattr(sound_files, "_SAMPLES_MAX", 12000)
    assert sound_files.read_sound(path, "video", begin=1.0) is not None
    with pytest.raises(InvalidValueError, match="has a sound of more than 0 minutes"):
        sound_files.read_sound(path, "video")


@pytest.mark.parametrize("length", [1.99, 2.01])
def test_a_sound_is_as_long_as_its_frames(length: float) -> None:
    samples = torch.ones(1, 2, round(length * RATE))
    fitted = Waveform(samples, RATE).fitted(2.0).samples
    assert fitted.shape[2] == 2 * RATE
    assert torch.equal(fitted[..., : samples.shape[2]], samples[..., : 2 * RATE])
    assert not fitted[..., samples.shape[2] :].any()


@pytest.mark.parametrize(("frames", "height", "width", "fps"), [(121, 512, 768, 24), (9, 64, 96, 8), (1, 64, 64, 24)])
def test_latents_hold_the_sound_behind_the_video(frames: int, height: int, width: int, fps: int) -> None:
    settings = dataclasses.replace(card.LTX2.defaults, num_frames=frames, height=height, width=width, fps=fps)
    video = torch.randn(2, 4, card.LTX2.latent_frames(settings), height // 32, width // 32)
    sound = torch.randn(2, card.LTX2.sound_tokens(settings), 4)
    packed = join_sound(video, sound)
    assert tuple(packed.shape[2:]) == card.LTX2.latent_size(settings)
    for made, wanted in zip(split_sound(packed, video.shape[2], sound.shape[1]), (video, sound), strict=True):
        assert torch.equal(made, wanted)
    found = settings_of_latents(tuple(packed.shape), 4, card.LTX2, settings, {})
    assert (found.num_frames, found.height, found.width, found.num_videos) == (frames, height, width, 2)


def test_latents_that_no_frame_rate_explains() -> None:
    with pytest.raises(InvalidValueError, match="no video of 24 frames per second has as many with its sound; decode"):
        settings_of_latents((1, 4, 4, 2, 2), 4, card.LTX2, card.LTX2.defaults, {})


def test_the_sound_of_five_seconds_has_as_many_latents_as_in_diffusers() -> None:
    assert card.LTX2.sound_tokens(card.LTX2.defaults) == round(Fraction(121, 24) * 25) == 126
