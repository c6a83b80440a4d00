"""Frames between frames, against RIFE in plain PyTorch; a video's frames as they come; what is refused."""

import json
import shutil
import types
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from comfy_tpu.cli.interpolate import _name_output
from comfy_tpu.cli.main import main
from comfy_tpu.config import Interpolation
from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.pipeline import interpolation, media
from comfy_tpu.pipeline.interpolation import Interpolator, check_interpolation, read_interpolation
from comfy_tpu.pipeline.sound import Waveform
from tests.closeness import SAME, psnr
from tests.jobs.test_previews import run_jobs
from tests.pipeline import small_ifnet as small
from tests.pipeline.clips import write_flash, write_images
from tests.pipeline.test_sound import read

FRAMES = torch.rand(2, 3, 40, 72, 3, generator=torch.Generator().manual_seed(1))


def opened(path: Path, tensors: small.Tensors, factor: int = 2) -> Interpolator:
    save_file(tensors, path)
    return Interpolator(Interpolation(factor, path))


def smooth(frames: torch.Tensor) -> torch.Tensor:
    """Noise has no motion; blurred, a wrong place is seen as one."""
    flat = frames.flatten(0, 1).movedim(-1, 1)
    return torch.nn.functional.avg_pool2d(flat, 9, 1, 4).movedim(1, -1).unflatten(0, frames.shape[:2])


def test_frames_between(tmp_path: Path) -> None:
    tensors, frames = small.make_tensors(), smooth(FRAMES)
    made = list(opened(tmp_path / "rife_v4.26.safetensors", tensors, 4).interpolate(frames.split((1, 2), dim=1)))
    assert [part.shape for part in made] == [(2, 1, 40, 72, 3), (2, 8, 40, 72, 3)]
    video = torch.cat(made, dim=1)
    assert torch.equal(video[:, ::4], frames)
    for row, number, step in ((0, 0, 1), (1, 1, 2), (1, 1, 3)):
        expected = small.interpolate(tensors, frames[row, number], frames[row, number + 1], step / 4)
        assert psnr(video[row, 4 * number + step], expected) >= SAME
    mixed = (frames[0, 0] + frames[0, 1]) / 2
    assert psnr(video[0, 2], mixed) < 40, "it is not a mean"
    other = small.interpolate(tensors, frames[0, 0], frames[0, 1], 0.75)
    assert psnr(other, small.interpolate(tensors, frames[0, 0], frames[0, 1], 0.25)) < 60, "the time is read"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "widths", "features", "scales"),
    [
        ("rife_v4.25_lite", (16, 12, 8, 8, 24), 4, (32, 16, 8, 4, 1)),
        ("rife_v4.26_heavy", (16, 12, 8, 8, 4), 16, (16, 8, 4, 2, 1)),
    ],
)
def test_other_files(name: str, widths: Any, features: int, scales: Any, tmp_path: Path) -> None:
    tensors, frames = small.make_tensors(widths, features=features), smooth(FRAMES)
    prefixed = {f"module.{key}": value for key, value in tensors.items()} | {"module.teacher.x": torch.zeros(1)}
    (video,) = opened(tmp_path / f"{name}.safetensors", prefixed).interpolate([frames[:1, :2]])
    expected = small.interpolate(tensors, frames[0, 0], frames[0, 1], 0.5, scales)
    assert psnr(video[0, 1], expected) >= SAME


def test_single_frames(tmp_path: Path) -> None:
    made = list(opened(tmp_path / "x.safetensors", small.make_tensors()).interpolate([FRAMES[:, :1], FRAMES[:, :0]]))
    assert [part.shape[1] for part in made] == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: {"block0.conv0.0.0.weight": torch.zeros(1)},
            "holds no network that is read here: it has block0",
        ),
        (
            lambda tensors: {name: each for name, each in tensors.items() if not name.startswith("block2")},
            r"is not a whole network \(KeyError",
        ),
        (lambda tensors: {**tensors, "block1.convblock.3.beta": torch.zeros(3)}, r"block1\.convblock\.3\.beta"),
    ],
)
def test_files_that_do_not_fit(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)interpolation_model=.*x.safetensors.*{message}") as caught:
        opened(tmp_path / "x.safetensors", change(small.make_tensors()))
    assert caught.value.field == "interpolation_model"


def test_pickles_are_refused_before_devices_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpolation, "make_placement", lambda *given, **more: pytest.fail("devices were started"))
    (tmp_path / "rife47.pth").write_bytes(b"")
    with pytest.raises(CheckpointError, match="interpolation_model=.*such files are pickles"):
        Interpolator(Interpolation(2, tmp_path / "rife47.pth"))


def test_values() -> None:
    assert read_interpolation(None, None) is None
    assert read_interpolation(4, "x.safetensors") == Interpolation(4, Path("x.safetensors"))
    for factor, model, message in (
        (2, None, "interpolation_model is missing: frames between frames are made by a network; give its file"),
        (1, "x", "interpolate=1 is not a whole number from 2 to 8; 2 doubles the frames per second"),
        ("2.5", "x", "interpolate='2.5' is not a whole number from 2 to 8"),
        (None, "x", "interpolation_model=x is for more frames; give --interpolate too, such as 2"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            read_interpolation(factor, model)
    chosen = Interpolation(8, Path("x"))
    check_interpolation(chosen, makes_images=False, fps=30, fps_max=240)
    with pytest.raises(InvalidValueError, match="interpolate=8 makes 248 frames per second of 31, more than 240"):
        check_interpolation(chosen, makes_images=False, fps=31, fps_max=240)
    with pytest.raises(InvalidValueError, match="interpolate=8 is for videos, and the model makes images"):
        check_interpolation(chosen, makes_images=True, fps=1, fps_max=240)


def write_clip(path: Path, *, frames: int = 4, fps: int = 12, sounds: bool = True) -> Path:
    seconds = frames / fps
    rate, times = 8000, torch.arange(round(8000 * seconds)) / 8000
    sound = Waveform(torch.sin(2 * torch.pi * 440 * times).mul(0.5).expand(1, 2, -1).contiguous(), rate)
    video = smooth(FRAMES)[:1, [0, 1, 2, 1]][:, :frames]
    options: dict[str, Any] = {"fps": fps, "metadata": [{}]}
    media.write_videos([path], [video], **options, sound=sound if sounds else None)
    return path


def read_clip(path: Path) -> tuple[int, int, list[tuple[int, float]]]:
    """Frames, frames per second, and rate and seconds of each sound."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        sounds = [(each.rate, float(each.duration * each.time_base)) for each in container.streams.audio]
        assert stream.average_rate is not None
        return sum(1 for _ in container.decode(stream)), round(float(stream.average_rate)), sounds


def repeat_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each frame be shown twice: the network is that of another test here, and is not compiled again."""
    monkeypatch.setattr(
        Interpolator, "_between", lambda self, first, second, times: first[:, None].expand(-1, 1, -1, -1, -1)
    )


def test_a_finished_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the rate, the same sound."""
    repeat_frames(monkeypatch)
    save_file(small.make_tensors(), tmp_path / "rife.safetensors")
    clip, model = write_clip(tmp_path / "clip.mp4"), str(tmp_path / "rife.safetensors")
    assert main(["interpolate", str(clip), "--model", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "outputs": [str(tmp_path / "clip-2x.mp4")],
        "frames": 7,
        "fps": 24,
    }
    frames, fps, sounds = read_clip(tmp_path / "clip-2x.mp4")
    assert (frames, fps) == (7, 24)
    assert sounds == [(8000, pytest.approx(4 / 12, abs=1 / 12))]
    assert media.read_metadata(tmp_path / "clip-2x.mp4")["interpolation"].endswith(" x2")


@pytest.mark.parametrize("name", ["late.mkv", "late.mp4"])
def test_a_late_sound_stays_late(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat_frames(monkeypatch)
    save_file(small.make_tensors(), tmp_path / "rife.safetensors")
    clip, output = write_flash(tmp_path / name, at=1.5, sound_begin=1.0), tmp_path / "x.mp4"
    assert main(["interpolate", str(clip), "--model", str(tmp_path / "rife.safetensors"), "-o", str(output)]) == 0
    brightness, _, samples, rate, start = read(output)
    assert np.argmax(brightness > 128) / 20 == 1.5
    assert abs(start + np.argmax(np.abs(samples[0]) > 0.3) / rate - 1.5) < 0.01


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["clip.mp4", "--model", "rife.safetensors", "--factor", "9"], "--factor 9 is not a whole number from 2 to 8"),
        (["clip.mp4"], "--model is missing: frames between frames are made by a network; give its file, such as"),
        (["still.png", "--model", "rife.safetensors"], "VIDEO still.png is one picture; give a video of two frames"),
        (["frames", "--model", "rife.safetensors"], "--fps is missing: frames has no times, as a video file has; give"),
        (["none.mp4", "--model", "rife.safetensors"], "VIDEO none.mp4 is not a file; give a video such as clip.mp4"),
        (
            ["clip.mp4", "--model", "rife.safetensors", "-o", "clip.mp4"],
            "--output clip.mp4 would replace clip.mp4, which",
        ),
        (
            ["clip.mp4", "--model", "rife.safetensors", "--fps", "100", "--factor", "4"],
            "more than 240; choose a smaller",
        ),
        (["clip.mp4", "--model", "clip.mp4"], "--model clip.mp4 is not a .safetensors file"),
        (
            ["clip.mp4", "--model", "rife.safetensors", "-o", "x.png"],
            "--output x.png is one image and the video has 7 frames; write x-%04d.png",
        ),
        (
            ["clip.mp4", "--model", "rife.safetensors", "--contact-sheet", "x.jpg"],
            "--contact-sheet x.jpg is an image; give it a name in .png",
        ),
        (
            ["clip.mp4", "--model", "rife.safetensors", "--contact-sheet", "a/b/x.png"],
            "--contact-sheet a/b/x.png is in a/b, and there is no a; create it first",
        ),
    ],
)
def test_refused_on_a_command_line(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(interpolation, "make_placement", lambda *given, **more: pytest.fail("devices were started"))
    monkeypatch.setattr("comfy_tpu.cli.interpolate.start_devices", lambda platform: None)
    save_file(small.make_tensors(), tmp_path / "rife.safetensors")
    write_clip(tmp_path / "clip.mp4", sounds=False)
    Image.new("RGB", (32, 32)).save("still.png")
    (tmp_path / "frames").mkdir()
    for number in range(2):
        Image.new("RGB", (32, 32)).save(f"frames/{number}.png")
    monkeypatch.setattr(Interpolator, "interpolate", lambda *given: pytest.fail("frames were made"))
    assert main(["interpolate", *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_full_disk_is_found_before_frames_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("comfy_tpu.cli.interpolate.start_devices", lambda platform: pytest.fail("devices were started"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=0))
    clip = write_clip(tmp_path / "clip.mp4", sounds=False)
    assert main(["interpolate", str(clip), "--model", "rife.safetensors", "-o", str(tmp_path / "x.npy")]) == 1
    assert "needs 0.1 MiB at least and" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "output"),
    [(".", "../frames-2x.mp4"), ("sub/..", "../frames-2x.mp4"), ("../frames", "../frames-2x.mp4")],
)
def test_the_current_directory(
    argument: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repeat_frames(monkeypatch)
    save_file(small.make_tensors(), tmp_path / "rife.safetensors")
    (write_images(tmp_path / "frames", 3) / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "frames")
    assert main(["interpolate", argument, "--fps", "8", "--model", "../rife.safetensors"]) == 0
    assert Path(capsys.readouterr().out.strip()).samefile(output)


def test_a_video_that_is_there_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repeat_frames(monkeypatch)
    save_file(small.make_tensors(), tmp_path / "rife.safetensors")
    clip = write_clip(tmp_path / "clip.mp4", sounds=False)
    (tmp_path / "clip-2x.mp4").write_bytes(b"of somebody")
    assert main(["interpolate", str(clip), "--model", str(tmp_path / "rife.safetensors")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'clip-2x-1.mp4'}\n"
    assert (tmp_path / "clip-2x.mp4").read_bytes() == b"of somebody"


@pytest.mark.parametrize("name", ["/", "/.."])
def test_the_root_has_no_name(name: str) -> None:
    assert _name_output(Path(name), 4) == Path("/video-4x.mp4")


@pytest.mark.parametrize("flag", ["--mesh", "--dtype", "--quantize"])
def test_options_that_change_nothing_are_not_taken(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["interpolate", "clip.mp4", "--model", "rife.safetensors", flag, "auto"])
    assert f"unrecognized arguments: {flag} auto" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_and_jobs(tmp_path: Path) -> None:
    save_file(small.make_tensors(), tmp_path / "rife.safetensors")
    model = str(tmp_path / "rife.safetensors")
    flags = ["--height", "32", "--width", "32", "--num-frames", "5", "--steps", "2", "--fps", "8"]
    output = tmp_path / "x.mp4"
    more = ["--interpolate", "3", "--interpolation-model", model]
    assert main(["generate", "a red circle", *flags, *more, "-o", str(output)]) == 0
    assert read_clip(output) == (13, 24, [])
    common = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "fps": 8}
    given = {"interpolate": 3, "interpolation_model": model}
    run_jobs(tmp_path / "jobs", ["a red circle"], [], batch_size=1, model="demo", **common, **given)
    assert read_clip(tmp_path / "jobs" / "0.mp4") == (13, 24, [])
