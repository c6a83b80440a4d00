"""Video files of every kind, written with PyAV. The number of a frame can be read off its colour."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

SIZE = (64, 48)
UPRIGHT = (1, 0, 0, 1)
_MILLISECONDS = Fraction(1, 1000)


def picture(number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """Gray by its number, with a white corner at the upper left."""
    pixels = np.full((size[1], size[0], 3), 20 * (number % 12), np.uint8)
    pixels[: size[1] // 3, : size[0] // 3] = 255
    return Image.fromarray(pixels)


def numbers(frames: Iterable[Image.Image]) -> list[int]:
    """The numbers of the frames that `picture` drew."""
    return [round(np.asarray(frame)[-4:, -4:].mean() / 20) for frame in frames]


def corner(frame: Image.Image) -> tuple[int, int]:
    """Where the white corner is: (0, 0) is the upper left, (1, 0) the upper right."""
    pixels = np.asarray(frame.convert("L")).astype(int)
    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    return max(places, key=lambda place: pixels[-place[1] * 2 + place[1], -place[0] * 2 + place[0]])


def write_video(
    path: Path,
    times: Sequence[int] = tuple(range(0, 400, 40)),
    *,
    size: tuple[int, int] = SIZE,
    matrix: tuple[int, int, int, int] = UPRIGHT,
    ratio: Fraction | None = None,
    sound: bool = False,
    empty_track: bool = False,
    first: int = 0,
) -> Path:
    """`times`: when each picture is shown, in milliseconds; none: no pictures. `matrix`: how an MP4 turns them.
    `first`: the number of the first picture."""
    with av.open(str(path), "w") as container:
        if times or empty_track:
            stream = container.add_stream("libx264", rate=25, options={"crf": "8"})
            stream.width, stream.height = size
            stream.pix_fmt = "yuv420p"
            stream.codec_context.time_base = stream.time_base = _MILLISECONDS
            if ratio is not None:
                stream.codec_context.sample_aspect_ratio = ratio
            for number, time in enumerate(times):
                frame = av.VideoFrame.from_image(picture(number + first, size))
                frame.pts, frame.time_base = time, _MILLISECONDS
                container.mux(stream.encode(frame))
            if times:
                container.mux(stream.encode(None))
        if sound:  # alone: a container's streams have to be there before the first packet
            assert not times
            track = container.add_stream("aac", rate=8000)
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate, silence.pts = 8000, 0
            container.mux(track.encode(silence))
            container.mux(track.encode(None))
    if matrix != UPRIGHT:
        _write_matrix(path, matrix)
    return path


def write_flash(
    path: Path,
    *,
    at: float = 1.5,
    video_begin: float = 0.0,
    sound_begin: float = 0.0,
    missing: tuple[float, float] = (0.0, 0.0),
) -> Path:
    """A video of two seconds that turns white at `at`, with a click at the same time. `video_begin`, `sound_begin`:
    the times of the first picture and sample; `missing`: the seconds between which packets of sound are left out."""
    fps, rate, block = 10, 8000, 160
    begin, end = round(sound_begin * rate), 2 * rate
    samples = np.zeros((1, end), np.float32)
    samples[0, round(at * rate) :][:200] = 0.9 * np.sin(np.arange(200) * 0.8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        track = container.add_stream("aac" if path.suffix == ".mp4" else "pcm_s16le", rate=rate)
        track.codec_context.layout = "mono"
        for number in range(round(video_begin * fps), 2 * fps):
            shade = 255 if number >= round(at * fps) else 0
            frame = av.VideoFrame.from_ndarray(np.full((SIZE[1], SIZE[0], 3), shade, np.uint8), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        for first in range(begin, end, block):
            if missing[0] <= first / rate < missing[1]:
                continue
            part = samples[:, first : first + block]
            if path.suffix != ".mp4":
                part = (part * 32767).astype(np.int16)
            sound = av.AudioFrame.from_ndarray(part, format="fltp" if path.suffix == ".mp4" else "s16", layout="mono")
            sound.sample_rate, sound.pts, sound.time_base = rate, first, Fraction(1, rate)
            container.mux(track.encode(sound))
        container.mux(track.encode(None))
    return path


def write_images(directory: Path, count: int, name: str = "frame_{:03d}.png", size: tuple[int, int] = SIZE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture(number, size).save(directory / name.format(number))
    return directory


def _write_matrix(path: Path, matrix: tuple[int, int, int, int]) -> None:
    """Writes the display matrix of the first track into its header, as cameras do."""
    content = bytearray(path.read_bytes())
    begin = content.index(b"tkhd") + 4 + 4 + 20 + 8 + 8
    a, b, c, d = (each * 65536 for each in matrix)
    struct.pack_into(">9i", content, begin, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)


def write_odd_videos(directory: Path) -> None:
    """A clip of nine frames, one of four, one picture, a file with sound only, and one whose video has no frames; nine
    frames that their metadata turn by 90 and by 45 degrees; and seven pictures of 18 frames' time."""
    write_video(directory / "clip.mp4", range(0, 360, 40))
    write_video(directory / "short.mp4", range(0, 160, 40))
    write_video(directory / "song.mp4", [], sound=True)
    write_video(directory / "empty.mkv", [], sound=True, empty_track=True)
    write_video(directory / "one.mp4", [0])
    write_video(directory / "turned.mp4", range(0, 360, 40), matrix=(0, 1, -1, 0))
    write_video(directory / "oblique.mp4", range(0, 360, 40), matrix=(1, 1, -1, 1))
    write_video(directory / "uneven.mp4", [0, 10, 20, 200, 210, 220, 700])
