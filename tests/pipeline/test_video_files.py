"""Given videos: what is read of each kind of file, at which times, and what is refused."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.video_files import Frames, open_video
from tests.pipeline.clips import SIZE, corner, numbers, picture, write_images, write_video


def read(path: Path, fps: float) -> list[int]:
    source = open_video(path, "video")
    found = numbers(source.frames(fps))
    assert len(found) == source.count(fps), "counted without decoding"
    return found


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov", "avi", "ts"])
def test_frames_of_the_same_rate_are_taken_one_by_one(tmp_path: Path, suffix: str) -> None:
    path = write_video(tmp_path / f"x.{suffix}")
    assert open_video(path, "video").size == SIZE
    assert read(path, 25) == list(range(10))
    assert read(path, 24.9) == list(range(10)), "half a percent is no reason to drop a frame"


def test_another_rate_keeps_the_speed(tmp_path: Path) -> None:
    path = write_video(tmp_path / "x.mp4")
    assert read(path, 50) == [number for number in range(10) for _ in range(2)]
    assert read(path, 12.5) == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_variable_rate_is_read_by_the_times(tmp_path: Path, suffix: str) -> None:
    path = write_video(tmp_path / f"x.{suffix}", [0, 40, 80, 280, 320])
    assert read(path, 25) == [0, 1, 2, 2, 2, 2, 2, 3, 4]
    assert read(path, 50) == [0, 0, 1, 1, *[2] * 10, 3, 3, 4, 4]


def test_times_that_do_not_begin_at_zero(tmp_path: Path) -> None:
    assert read(write_video(tmp_path / "x.mkv", range(1000, 1400, 40)), 25) == list(range(10))


@pytest.mark.parametrize(
    ("matrix", "size", "place"),
    [
        ((1, 0, 0, 1), (64, 48), (0, 0)),
        ((0, 1, -1, 0), (48, 64), (1, 0)),
        ((-1, 0, 0, -1), (64, 48), (1, 1)),
        ((0, -1, 1, 0), (48, 64), (0, 1)),
        ((-1, 0, 0, 1), (64, 48), (1, 0)),
        ((1, 0, 0, -1), (64, 48), (0, 1)),
        ((0, 1, 1, 0), (48, 64), (0, 0)),
        ((0, -1, -1, 0), (48, 64), (1, 1)),
    ],
)
def test_a_video_is_turned_as_its_metadata_say(
    tmp_path: Path, matrix: tuple[int, int, int, int], size: tuple[int, int], place: tuple[int, int]
) -> None:
    source = open_video(write_video(tmp_path / "x.mp4", [0, 40], matrix=matrix), "video")
    first = next(iter(source.frames(25)))
    assert (source.size, first.size, corner(first)) == (size, size, place)


def test_pixels_that_are_not_square(tmp_path: Path) -> None:
    source = open_video(write_video(tmp_path / "x.mkv", [0, 40], ratio=Fraction(3, 2)), "video")
    assert (source.size, next(iter(source.frames(25))).size) == ((96, 48), (96, 48))


def test_colours_come_back(tmp_path: Path) -> None:
    given = torch.zeros(2, 48, 64, 3)
    given[..., 0], given[:, :24, :, 1], given[:, :, 32:, 2] = 0.8, 0.4, 0.6
    media.write_videos([tmp_path / "x.mp4"], [given[None]], fps=16, metadata=[{}])
    found = [np.asarray(frame) / 255 for frame in open_video(tmp_path / "x.mp4", "video").frames(16)]
    inner = np.abs(np.stack(found) - given.numpy())[:, 4:20, 4:28]
    assert inner.max() < 0.02, "of the same matrix and range as they were written with"


def test_a_directory_of_numbered_images(tmp_path: Path) -> None:
    path = write_images(tmp_path / "frames", 11, "{}.png")
    (path / "notes.txt").write_text("of no use")
    (path / ".hidden1.png").write_text("of no use")
    assert read(path, 7) == list(range(11)), "by number, not by name, and whatever the rate"


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_animations(tmp_path: Path, suffix: str) -> None:
    first, *others = (picture(number) for number in range(5))
    options = {"lossless": True} if suffix == "webp" else {}
    first.save(tmp_path / f"x.{suffix}", save_all=True, append_images=others, duration=100, **options)
    source = open_video(tmp_path / f"x.{suffix}", "video")
    assert (source.size, source.is_picture) == (SIZE, False)
    assert read(tmp_path / f"x.{suffix}", 10) == [0, 1, 2, 3, 4]
    assert read(tmp_path / f"x.{suffix}", 20) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_picture_is_one(tmp_path: Path) -> None:
    picture(3).save(tmp_path / "x.png")
    source = open_video(tmp_path / "x.png", "mask")
    assert (source.is_picture, source.count(16), numbers(source.frames(16))) == (True, 1, [3])


def _bytes(content: bytes, name: str) -> object:
    return lambda directory: (directory / name).write_bytes(content) and directory / name


def _empty(directory: Path) -> Path:
    (directory / "empty.mp4").write_bytes(b"")
    return directory / "empty.mp4"


def _truncated(directory: Path) -> Path:
    content = write_video(directory / "x.mp4").read_bytes()
    (directory / "cut.mp4").write_bytes(content[: len(content) // 2])
    return directory / "cut.mp4"


def _playlist(directory: Path) -> Path:
    write_video(directory / "x.mp4")
    (directory / "x.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\nx.mp4\n#EXT-X-ENDLIST\n")
    return directory / "x.m3u8"


def _without_numbers(directory: Path) -> Path:
    path = write_images(directory / "frames", 2)
    picture(0).save(path / "cover.png")
    return path


def _twice(directory: Path) -> Path:
    path = write_images(directory / "frames", 2)
    picture(0).save(path / "other_1.png")
    return path


def _no_images(directory: Path) -> Path:
    (directory / "frames").mkdir()
    return directory / "frames"


def _huge(directory: Path) -> Path:
    Image.new("1", (20000, 8)).save(directory / "x.png")
    return directory / "x.png"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda directory: directory / "none.mp4", "is not a file; give a video such as clip.mp4"),
        (_empty, r"cannot be read as a video \(.+\); give an MP4, MOV, MKV, WebM or AVI file"),
        (_truncated, "cannot be read as a video"),
        (_bytes(b"some words", "x.mp4"), "cannot be read as a video"),
        (_playlist, "cannot be read as a video"),
        (lambda directory: write_video(directory / "x.mp4", [], sound=True), "holds sound only; give a file with"),
        (_no_images, "is a directory without images; give one with frame_0000.png"),
        (_without_numbers, "holds cover.png, which has no number"),
        (_twice, "holds frame_001.png and other_1.png, which have the same number"),
        (_huge, "is 20000×8, more than 16384 on a side"),
    ],
)
def test_what_is_no_video(tmp_path: Path, make: object, message: str) -> None:
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(InvalidValueError, match=rf"^video=.*{message}") as error:
        open_video(path, "video")
    assert error.value.field == "video"


def test_a_video_without_frames(tmp_path: Path) -> None:
    path = write_video(tmp_path / "x.mkv", [], sound=True, empty_track=True)
    with pytest.raises(InvalidValueError, match=r"x\.mkv has no frames; give another video"):
        open_video(path, "video")


def test_a_directory_of_several_sizes_is_found_while_it_is_read(tmp_path: Path) -> None:
    path = write_images(tmp_path / "frames", 2)
    picture(2, (32, 32)).save(path / "frame_002.png")
    with pytest.raises(InvalidValueError, match=r"holds frame_002\.png of 32×32 beside images of 64×48"):
        list(open_video(path, "video").frames(16))


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    one = write_video(tmp_path / "a.mp4")
    other = write_video(tmp_path / "b.mp4", first=1)
    (tmp_path / "c.mp4").write_bytes(one.read_bytes())
    digests = [open_video(tmp_path / f"{name}.mp4", "video").digest() for name in "abc"]
    assert digests[0] == digests[2] != digests[1]
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    assert Frames(frames).digest() != Frames(frames[:1]).digest() != Frames(frames.reshape(1, 4, 8, 3)).digest()
    assert open_video(write_images(tmp_path / "x", 2), "video").digest() != other
