import ctypes
import errno
import json
import os
import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError
from comfy_tpu.pipeline import media, video_formats
from tests.closeness import psnr

ROOT = Path(__file__).parents[2]
SETTINGS = GenerationSettings(height=48, width=64, num_frames=9)
METADATA = {"prompt": "ein roter Würfel, 红色\nzweite Zeile", "seed": "7", "settings": '{"steps": 3}'}


def moving_square(frames=9, height=48, width=64):
    video = torch.empty(frames, height, width, 3)
    video[:] = torch.tensor([0.1, 0.2, 0.5])
    for frame in range(frames):
        video[frame, 10:30, 4 * frame : 4 * frame + 16] = torch.tensor([0.9, 0.1, 0.1])
    return video


def write(output, frames, fps=12, metadata=METADATA):
    with media.open_writer(output, fps=fps, metadata=metadata) as writer:
        for chunk in frames.split(4):
            writer.write(chunk)


def read_mp4(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def read_gif(path):
    with Image.open(path) as image:
        frames, durations = [], []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")))
            durations.append(image.info["duration"])
        return np.stack(frames), durations, image.info["loop"]


def files(directory):
    """Everything, hidden files too."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_mp4(tmp_path):
    path = tmp_path / "x.mp4"
    write(path, moving_square())
    found = read_mp4(path)
    assert found.shape == (9, 48, 64, 3)
    assert psnr(found / 255, moving_square()) > 33
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == Fraction(12)
        frame = next(container.decode(video=0))
        assert (frame.colorspace, frame.color_range) == (1, 1)  # BT.709, limited
        assert container.metadata["title"] == METADATA["prompt"]
        assert json.loads(container.metadata["comment"]) == METADATA
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")  # faststart
    assert media.read_metadata(path) == METADATA


def test_mp4_of_odd_size_repeats_the_last_row_and_column(tmp_path):
    frames = moving_square(5, 33, 45)
    write(tmp_path / "x.mp4", frames)
    found = read_mp4(tmp_path / "x.mp4")
    assert found.shape == (5, 34, 46, 3)
    assert psnr(found[:, :33, :45] / 255, frames) > 30
    assert abs(found[:, 33].astype(int) - found[:, 32]).max() < 12


def test_gif(tmp_path):
    write(tmp_path / "x.gif", moving_square(), fps=16)
    found, durations, loop = read_gif(tmp_path / "x.gif")
    assert found.shape == (9, 48, 64, 3)
    assert psnr(found / 255, moving_square()) > 45  # few colours: only rounding is lost
    assert loop == 0
    assert set(durations) == {60, 70}
    assert sum(durations) == pytest.approx(9 * 1000 / 16, abs=10)
    assert media.read_metadata(tmp_path / "x.gif") == METADATA


def test_gif_takes_new_colours_for_each_frame(tmp_path):
    frames = torch.stack([torch.rand(8, 8, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(12)])
    write(tmp_path / "x.gif", frames)
    found, _, _ = read_gif(tmp_path / "x.gif")
    assert psnr(found / 255, frames) > 45  # 64 pixels a frame, 768 colours in all: more than one palette holds


def test_gif_is_not_faster_than_browsers_allow(tmp_path):
    write(tmp_path / "x.gif", moving_square(), fps=100)
    assert set(read_gif(tmp_path / "x.gif")[1]) == {20}


def test_npy(tmp_path):
    frames = moving_square(123, 4, 6)  # more digits in the header than at the start
    write(tmp_path / "x.npy", frames)
    found = np.load(tmp_path / "x.npy")
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, (frames * 255).round().numpy())
    assert media.read_metadata(tmp_path / "x.npy") == {}


@pytest.mark.parametrize(
    ("output", "first"),
    [("out/", "out/frame_0000.png"), ("out", "out/frame_0000.png"), ("out/f-%03d 100%.png", "out/f-000 100%.png")],
    ids=["slash", "existing directory", "pattern"],
)
def test_png_frames(output, first, tmp_path):
    if output == "out":
        (tmp_path / "out").mkdir()
    write(f"{tmp_path}/{output}", moving_square())
    names = files(tmp_path)
    assert names[0] == first
    assert len(names) == 9
    found = np.stack([np.asarray(Image.open(tmp_path / name)) for name in names])
    np.testing.assert_array_equal(found, (moving_square() * 255).round().numpy())
    assert media.read_metadata(f"{tmp_path}/{output}") == METADATA
    with Image.open(tmp_path / first) as image:
        assert "prompt" not in image.text  # ComfyUI would read it as a workflow


def test_new_frames_replace_the_whole_older_sequence_and_nothing_else(tmp_path):
    (tmp_path / "frame_notes.png").touch()
    write(f"{tmp_path}/", moving_square(9))
    write(f"{tmp_path}/", moving_square(5))
    assert files(tmp_path) == [f"frame_{n:04}.png" for n in range(5)] + ["frame_notes.png"]


def test_single_image(tmp_path):
    write(tmp_path / "x.png", moving_square(1))
    np.testing.assert_array_equal(Image.open(tmp_path / "x.png"), (moving_square(1)[0] * 255).round().numpy())
    assert media.read_metadata(tmp_path / "x.png") == METADATA
    with pytest.raises(InvalidValueError, match="got a second frame"):
        write(tmp_path / "y.png", moving_square(2))


OUTPUTS = ["x.mp4", "x.gif", "x.npy", "x.png", "out/"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
@pytest.mark.parametrize("output", OUTPUTS)
def test_nothing_is_left_of_a_run_that_fails(output, error, tmp_path):
    def failing():
        yield moving_square(1 if output == "x.png" else 80, 32, 336)[None]  # x264 looks 50 frames ahead
        assert len(list(tmp_path.rglob(".comfy-tpu-*.partial"))) == 1
        raise error

    with pytest.raises(type(error)) as raised:
        media.write_videos(media.output_paths(f"{tmp_path}/{output}"), failing(), fps=8, metadata=[{}])
    assert list(tmp_path.iterdir()) == []
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in opened if ".partial" in str(path)], raised  # though the traceback holds the writer


def test_existing_file_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "x.gif"
    path.write_text("old")
    with pytest.raises(InvalidValueError):
        write(path, torch.zeros(1, 4, 4, 1))
    assert path.read_text() == "old"
    with media.open_writer(path, fps=8, metadata={}) as writer:
        writer.write(moving_square())
        assert path.read_text() == "old"
    assert len(read_gif(path)[0]) == 9


def test_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "x.npy").symlink_to(tmp_path / "disk" / "real.npy")
    write(tmp_path / "x.npy", moving_square())
    assert (tmp_path / "x.npy").is_symlink()
    assert np.load(tmp_path / "disk" / "real.npy").shape == (9, 48, 64, 3)


def test_of_several_videos_all_appear_or_none(tmp_path, monkeypatch):
    videos = torch.stack([moving_square(), moving_square().flip(2)])
    paths = media.output_paths(tmp_path / "x.npy", 2)
    media.write_videos(paths, iter(videos.split(4, dim=1)), fps=8, metadata=[{}, {}])
    assert files(tmp_path) == ["x-0.npy", "x-1.npy"]
    np.testing.assert_array_equal(np.load(paths[1]), np.load(paths[0])[:, :, ::-1])

    finish, calls = video_formats.Npy.finish, []

    def fails_the_second_time(self):
        calls.append(self)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(self)

    monkeypatch.setattr(video_formats.Npy, "finish", fails_the_second_time)
    with pytest.raises(ComfyTpuError, match="No space left"):
        media.write_videos(media.output_paths(tmp_path / "y.npy", 2), [videos], fps=8, metadata=[{}, {}])
    assert files(tmp_path) == ["x-0.npy", "x-1.npy"]


def test_disk_that_fills_up(tmp_path):
    """With a limit on the size of files: the same path through every library as a full disk, without one."""
    code = f"""
        import resource, torch
        from comfy_tpu.errors import ComfyTpuError
        from comfy_tpu.pipeline import media
        frames = torch.rand(20, 64, 64, 3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
        for output in {OUTPUTS}:
            try:
                with media.open_writer({str(tmp_path)!r} + "/" + output, fps=8, metadata={{}}) as writer:
                    writer.write(frames[:1] if output == "x.png" else frames)
            except ComfyTpuError as error:
                print(error)
    """
    environment = {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    reason = "could not be written: File too large; nothing of it was kept; free some space or choose another place"
    places = [f"{tmp_path}/{output}" for output in (*OUTPUTS[:-1], "out/frame_%04d.png")]
    assert done.stdout.splitlines() == [f"output={place} {reason}" for place in places]
    assert list(tmp_path.iterdir()) == []


def test_full_disk(tmp_path, monkeypatch):
    def full(self, frame):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(video_formats.Gif, "add", full)
    with pytest.raises(
        ComfyTpuError,
        match=r"^output=.*x.gif could not be written: No space left on device; nothing of it was kept; free some space",
    ):
        write(tmp_path / "x.gif", moving_square())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["x.gif", "x.npy", "out/"])
def test_frames_are_written_as_they_come(output, tmp_path):
    frames = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    sizes = []
    with media.open_writer(f"{tmp_path}/{output}", fps=8, metadata={}) as writer:
        for _ in range(3):
            writer.write(frames.repeat(5, 1, 1, 1))
            sizes.append(sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))
    assert sizes[0] > 0
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.3)  # all but what a buffer holds


REFUSED_FRAMES = {
    "not a number": (torch.full((1, 4, 4, 3), float("nan")), ComfyTpuError, "values that are not numbers"),
    "bytes": (torch.zeros(1, 4, 4, 3, dtype=torch.uint8), InvalidValueError, r"torch.uint8 \[1, 4, 4, 3\]"),
    "channels first": (torch.zeros(1, 3, 4, 4), InvalidValueError, r"expected floats \[t, height, width, 3\]"),
    "another size": (torch.zeros(1, 4, 6, 3), InvalidValueError, "follows frames of"),
    "none": (torch.zeros(0, 4, 4, 3), InvalidValueError, "got no frames"),
}


@pytest.mark.parametrize(("frames", "error", "text"), REFUSED_FRAMES.values(), ids=REFUSED_FRAMES)
def test_refused_frames(frames, error, text, tmp_path):
    chunks = [torch.zeros(1, 1, 4, 4, 3), frames[None]] if "follows" in text else [frames[None]]
    with pytest.raises(error, match=text):
        media.write_videos([tmp_path / "x.npy"], chunks, fps=8, metadata=[{}])
    assert list(tmp_path.iterdir()) == []


def test_values_beyond_the_range_are_cut_off(tmp_path):
    write(tmp_path / "x.npy", torch.tensor([-0.5, 0.5, 1.5], dtype=torch.bfloat16).expand(1, 2, 2, 3))
    assert np.load(tmp_path / "x.npy")[0, 0, 0].tolist() == [0, 128, 255]


REFUSED_OUTPUTS = {
    "unknown suffix": ("x.avi", "names no format; write video.mp4, video.gif, video.npy, frames/ or frames/%04d.png"),
    "no suffix": ("x", "names no format"),
    "directory": ("taken.mp4", "is a directory, expected a file; add a file name"),
    "no such place": ("a/b/x.mp4", "there is no .*/a; create it first"),
    "inside a file": ("file/x.mp4", "which is a file; choose another place"),
    "one image": ("x.png", "is one image and the video has 9 frames; write .*x-%04d.png, or ask for num_frames=1"),
    "two numbers": ("x%d-%d.png", "two places"),
    "too many digits": ("x-%99999999999d.png", "is one image and the video has 9 frames"),
}


@pytest.mark.parametrize(("output", "text"), REFUSED_OUTPUTS.values(), ids=REFUSED_OUTPUTS)
def test_refused_outputs(output, text, tmp_path):
    (tmp_path / "taken.mp4").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValueError, match=f"^output={tmp_path}/{output}.* ?{text}"):
        media.check_output(f"{tmp_path}/{output}", SETTINGS)
    assert files(tmp_path) == ["file"]


def test_unwritable_output():
    with pytest.raises(
        InvalidValueError, match="output=/proc/x.mp4 cannot be written: /proc: .*; choose another place"
    ):
        media.check_output("/proc/x.mp4", SETTINGS)


def test_disk_that_is_obviously_too_full(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 81_000})
    monkeypatch.setattr(media.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        InvalidValueError, match="x.npy needs 0.1 MiB at least and .* has 0.1 MiB free; free some space"
    ):
        media.check_output(tmp_path / "x.npy", SETTINGS)  # 82,944 bytes
    media.check_output(tmp_path / "x.mp4", SETTINGS)


def test_missing_directory_is_made_when_there_is_something_to_put_in(tmp_path):
    assert media.check_output(tmp_path / "new" / "x.npy", SETTINGS) == (tmp_path / "new" / "x.npy",)
    assert not (tmp_path / "new").exists()
    write(tmp_path / "new" / "x.npy", moving_square())
    assert files(tmp_path) == ["new/x.npy"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("x.mp4", ["x-0.mp4", "x-1.mp4"]),
        ("new/", ["new/video-0/frame_%04d.png", "new/video-1/frame_%04d.png"]),
        ("f%02d.png", ["video-0/f%02d.png", "video-1/f%02d.png"]),
        ("x%d.gif", ["x%d-0.gif", "x%d-1.gif"]),
    ],
)
def test_names_of_several_videos(output, expected, tmp_path):
    settings = GenerationSettings(height=48, width=64, num_frames=9, num_videos=2)
    paths = media.check_output(f"{tmp_path}/{output}", settings)
    assert [str(path.relative_to(tmp_path)) for path in paths] == expected
    media.write_videos(paths, [torch.stack([moving_square()] * 2)], fps=8, metadata=[{}, {}])
    assert all(len(media.find_metadata(path, 9)) == 0 for path in paths)
    assert len(files(tmp_path)) == (18 if "png" in expected[0] else 2)


def test_free_output(tmp_path):
    name = tmp_path / "video.mp4"
    assert media.free_output(name, 1) == name
    name.touch()
    (tmp_path / "video-1.mp4").touch()
    assert media.free_output(name, 1) == tmp_path / "video-2.mp4"
    assert media.free_output(name, 2) == tmp_path / "video-1.mp4"  # video-1-0.mp4 and video-1-1.mp4


def test_metadata_of_other_peoples_files(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    assert media.read_metadata(tmp_path / "x.png") == {}
    (tmp_path / "x.gif").write_text("no image")
    with pytest.raises(CheckpointError, match="x.gif cannot be read as gif"):
        media.read_metadata(tmp_path / "x.gif")
    assert media.find_metadata(tmp_path / "x.gif") == {}
    assert media.find_metadata(tmp_path / "missing.mp4") == {}


OTHER_FILES = {
    "concat": "ffconcat version 1.0\nfile secret.mp4\n",
    "hls": "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nsecret.mp4\n#EXT-X-ENDLIST\n",
}


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES)
def test_reading_a_video_opens_no_other_file(content, tmp_path):
    """FFmpeg knows a playlist by its content, and follows it, to other protocols too."""
    secret = tmp_path / "secret.mp4"
    write(secret, moving_square())
    (tmp_path / "x.mp4").write_text(content)
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(secret), 0x20) > 0, os.strerror(ctypes.get_errno())  # IN_OPEN
    try:
        assert media.find_metadata(tmp_path / "x.mp4") == {}
        with pytest.raises(BlockingIOError):  # nothing to tell
            os.read(watch, 4096)
        secret.read_bytes()
        assert os.read(watch, 4096)
    finally:
        os.close(watch)


def test_sequence_whose_frames_are_not_of_one_video_is_not_taken_for_the_video(tmp_path):
    """As runs that were killed left it before: the first frame is of the old video, others are of the new one."""
    write(f"{tmp_path}/", moving_square())
    write(f"{tmp_path}/new/", moving_square(), metadata={"prompt": "new"})
    pattern = tmp_path / "frame_%04d.png"
    assert media.find_metadata(pattern, 9) == METADATA
    (tmp_path / "new" / "frame_0005.png").replace(tmp_path / "frame_0005.png")
    assert media.find_metadata(pattern, 9) == {}


@pytest.mark.parametrize("missing", [0, 4, 8])
def test_sequence_without_a_frame_is_not_taken_for_the_video(missing, tmp_path):
    write(f"{tmp_path}/", moving_square())
    (tmp_path / f"frame_{missing:04}.png").unlink()
    assert media.find_metadata(tmp_path / "frame_%04d.png", 9) == {}


def test_sequence_without_its_last_frame_is_not_taken_for_the_video(tmp_path):
    write(f"{tmp_path}/", moving_square())
    pattern = tmp_path / "frame_%04d.png"
    assert media.find_metadata(pattern, 9) == METADATA
    (tmp_path / "frame_0008.png").unlink()
    assert media.find_metadata(pattern, 9) == {}


def test_contact_sheet():
    frames = moving_square(5, 64, 64)
    sheet = media.contact_sheet(frames, columns=3)
    assert sheet.size == (3 * 130 + 2, 2 * 130 + 2)  # cells of 128, gaps of 2
    cell = np.asarray(sheet)[132:260:2, 132:260:2]  # second row, second column: the last frame
    np.testing.assert_array_equal(cell, (frames[4] * 255).round().numpy())
    assert sheet.getpixel((391, 261)) == (255, 255, 255)
    assert media.contact_sheet(moving_square(2, 480, 848)).size == (2 * 258 + 2, 145 + 4)


def test_contact_sheet_beside_a_video(tmp_path):
    sheet = tmp_path / "sheet.png"
    media.write_videos([tmp_path / "x.npy"], [moving_square(9)[None]], fps=8, metadata=[METADATA], sheet=sheet)
    with Image.open(sheet) as image:
        assert image.size == (5 * 130 + 2, 98 + 2)  # frames 0, 2, 4, 6, 8
    assert media.read_metadata(sheet) == METADATA
