"""Opens given videos: video files, directories of numbered images, animations, single images, and frames in memory.

A video is opened first, which reads its headers and times and no picture, and read when the size and the length of the
result are known, one frame at a time: a source may be longer and larger than memory.

A result has a frame rate, `fps`. Of a source with times (a video file, an animation) the frame is taken that is shown
in the middle of each 1/fps seconds: a source of another rate, or of a variable one, keeps its speed. Where its rate is
constant and within 1 % of `fps`, frames are taken one by one, as they are of sources without times.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import av
import av.error
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageSequence, UnidentifiedImageError

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.image_files import FORMATS as IMAGE_FORMATS
from comfy_tpu.pipeline.image_files import IMAGE_ERRORS, open_image_file, quiet_images
from comfy_tpu.pipeline.images import PIXELS_MAX, SIDE_MAX, as_rgb, read_image

DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,ogg,flv,asf"
"""The containers that are read. Playlists (HLS, DASH, concat) are not among them: they name other files."""
_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"))
_SAME_RATE = 0.01
_PICTURES_MAX = 200_000
"""Of a video: two hours. The times of all are held in memory."""
_SECONDS_MAX = 4 * 3600
_NUMBER = re.compile(r"\d+")
_COVER = 0x400
"""The bit of a stream that is the cover of a song."""


class VideoSource(Protocol):
    """A given video."""

    @property
    def name(self) -> str:
        """The file, for messages; empty for frames in memory."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of its pictures, as they are shown."""
        ...

    @property
    def is_picture(self) -> bool:
        """Whether it is one picture, without a duration."""
        ...

    @property
    def pictures(self) -> int:
        """The number of its own pictures."""
        ...

    @property
    def begin(self) -> float:
        """When its first picture is shown by the clock of its file, in seconds; 0 where it has none."""
        ...

    @property
    def seconds(self) -> float:
        """How long it is shown; 0 where that is not known."""
        ...

    def count(self, fps: float) -> int:
        """The number of frames at this rate."""
        ...

    def frames(self, fps: float) -> Iterator[Image.Image]:
        """Yields the frames at this rate, RGB. Raises InvalidValueError where one cannot be read."""
        ...

    def digest(self) -> bytes:
        """A hash of the content."""
        ...


def open_video(path: Path, field: str, *, animations: bool = True) -> VideoSource:
    """The video of a file or directory; raises InvalidValueError, with `field`, for what holds none. `animations`:
    whether GIF, WebP and PNG may have several pictures, all of which are decoded to know their times."""
    if path.is_dir():
        return FrameDirectory.open(path, field)
    if not path.is_file():
        raise InvalidValueError(
            f"{field}={path} is not a file; give a video such as clip.mp4, or a directory of numbered images",
            field=field,
        )
    if is_image_file(path):
        return _open_image(path, field, animations)
    return VideoFile.open(path, field)


class Frames:
    """Frames in memory, without times."""

    name = ""

    def __init__(self, frames: npt.NDArray[np.uint8], *, is_picture: bool = False) -> None:
        """`frames`: [frames, height, width, 3]."""
        self.array = frames
        self.is_picture = is_picture

    begin = seconds = 0.0

    @property
    def size(self) -> tuple[int, int]:
        return self.array.shape[2], self.array.shape[1]

    @property
    def pictures(self) -> int:
        return len(self.array)

    def count(self, fps: float) -> int:
        return len(self.array)

    def frames(self, fps: float) -> Iterator[Image.Image]:
        return (Image.fromarray(frame) for frame in self.array)

    def digest(self) -> bytes:
        return hashlib.sha256(repr(self.array.shape).encode() + self.array.tobytes()).digest()


class FrameDirectory:
    """A directory of numbered images, in the order of their numbers."""

    is_picture = False
    begin = seconds = 0.0

    def __init__(self, path: Path, files: Sequence[Path], size: tuple[int, int], field: str) -> None:
        self._path, self._files, self._field = path, files, field
        self.size, self.pictures = size, len(files)

    @classmethod
    def open(cls, path: Path, field: str) -> FrameDirectory:
        found = [each for each in path.iterdir() if each.suffix.lower() in _SUFFIXES and not each.name.startswith(".")]
        if not found:
            raise InvalidValueError(
                f"{field}={path} is a directory without images; give one with frame_0000.png and so on", field=field
            )
        numbers: dict[int, Path] = {}
        for each in sorted(found):
            digits = _NUMBER.findall(each.stem)
            if not digits:
                raise InvalidValueError(
                    f"{field}={path} holds {each.name}, which has no number; name its images frame_0000.png and so on",
                    field=field,
                )
            if (other := numbers.setdefault(int(digits[-1]), each)) is not each:
                raise InvalidValueError(
                    f"{field}={path} holds {other.name} and {each.name}, which have the same number; remove one",
                    field=field,
                )
        files = [numbers[number] for number in sorted(numbers)]
        return cls(path, files, read_image(files[0], field).size, field)

    @property
    def name(self) -> str:
        return str(self._path)

    def count(self, fps: float) -> int:
        return len(self._files)

    def frames(self, fps: float) -> Iterator[Image.Image]:
        for file in self._files:
            image = read_image(file, self._field)
            if image.size != self.size:
                raise InvalidValueError(
                    f"{self._field}={self._path} holds {file.name} of {_size_text(image.size)} beside images of "
                    f"{_size_text(self.size)}; give images of one size",
                    field=self._field,
                )
            yield image

    def digest(self) -> bytes:
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(file.name.encode("utf-8", "surrogateescape") + b"\0" + _hash_file(file))
        return digest.digest()


class _Timed:
    """A source whose pictures have times."""

    def __init__(self, starts: Sequence[float], end: float, begin: float = 0.0) -> None:
        """`starts`: when each picture begins to be shown, from 0, rising; `end`: when the last one ends, in seconds;
        `begin`: when the first one begins by the file's clock."""
        self._starts, self.end, self.count, self.begin = starts, end, len(starts), begin

    def picks(self, fps: float) -> Sequence[int]:
        """The number of the picture of each frame at this rate."""
        if self._has_rate(fps):
            return range(len(self._starts))
        count = max(1, round(self.end * fps))
        return [max(bisect.bisect_right(self._starts, (frame + 0.5) / fps) - 1, 0) for frame in range(count)]

    def _has_rate(self, fps: float) -> bool:
        """Whether pictures follow each other at this rate, up to a hundredth."""
        rate = self.count / self.end
        is_constant = all(abs(start - index / rate) < 0.5 / rate for index, start in enumerate(self._starts))
        return is_constant and abs(rate / fps - 1) < _SAME_RATE


class Animation:
    """An animated GIF, WebP or PNG."""

    is_picture = False
    begin = 0.0

    def __init__(self, path: Path, size: tuple[int, int], timing: _Timed, field: str) -> None:
        self._path, self._timing, self._field = path, timing, field
        self.size, self.pictures, self.seconds = size, timing.count, timing.end

    @property
    def name(self) -> str:
        return str(self._path)

    def count(self, fps: float) -> int:
        return len(self._timing.picks(fps))

    def frames(self, fps: float) -> Iterator[Image.Image]:
        with _read_errors(self._path, self._field), quiet_images(), open_image_file(self._path) as opened:
            pictures = (as_rgb(picture) for picture in ImageSequence.Iterator(opened))
            yield from _repeat(pictures, self._timing.picks(fps))

    def digest(self) -> bytes:
        return _hash_file(self._path)


class VideoFile:
    """A video in a container such as MP4, of which the first video stream is read. Sound is ignored."""

    is_picture = False

    def __init__(self, path: Path, size: tuple[int, int], timing: _Timed, field: str) -> None:
        self._path, self._timing, self._field = path, timing, field
        self.size, self.pictures, self.seconds = size, timing.count, timing.end
        self.begin = timing.begin

    @classmethod
    def open(cls, path: Path, field: str) -> VideoFile:
        """Reads the times of all pictures, and the first of them."""
        with _open_container(path, field) as container:
            stream = _video_stream(container, path, field)
            timing = _read_times(container, stream, path, field)
        with _open_container(path, field) as container, _read_errors(path, field):
            first = next(_decode(container, path, field), None)
        if first is None:
            raise InvalidValueError(
                f"{field}={path} has no picture that can be decoded; give another video", field=field
            )
        return cls(path, first.size, timing, field)

    @property
    def name(self) -> str:
        return str(self._path)

    def count(self, fps: float) -> int:
        return len(self._timing.picks(fps))

    def frames(self, fps: float) -> Iterator[Image.Image]:
        with _open_container(self._path, self._field) as container, _read_errors(self._path, self._field):
            pictures = _decode(container, self._path, self._field)
            yield from _repeat(pictures, self._timing.picks(fps))

    def digest(self) -> bytes:
        return _hash_file(self._path)


def _repeat(pictures: Iterator[Image.Image], picks: Sequence[int]) -> Iterator[Image.Image]:
    """The pictures of these numbers, which do not fall; fewer where the pictures end before."""
    numbered = enumerate(pictures)
    number, current = next(numbered, (-1, None))
    for pick in picks:
        while number < pick:
            number, current = next(numbered, (-1, None))
            if current is None:
                return
        if current is None:
            return
        yield current


def is_image_file(path: Path) -> bool:
    try:
        with open_image_file(path):
            return True
    except Image.DecompressionBombError:
        return True  # refused below, as an image
    except IMAGE_ERRORS:
        return False


def _open_image(path: Path, field: str, animations: bool) -> VideoSource:
    first = read_image(path, field)  # checks sizes
    durations: list[float] = []
    with _read_errors(path, field), quiet_images(), open_image_file(path) as opened:
        if getattr(opened, "is_animated", False) and opened.format in ("GIF", "WEBP", "PNG"):
            if not animations:
                raise InvalidValueError(f"{field}={path} is an animation; give a video such as an MP4", field=field)
            for picture in ImageSequence.Iterator(opened):
                _check_size(*picture.size, path, field)  # a frame may be larger than the first
                picture.load()  # of WebP the duration is known then
                durations.append(max(float(picture.info.get("duration", 0) or 0), 10.0) / 1000)
    if not durations:
        return Frames(np.asarray(first)[None], is_picture=True)
    ends = list(itertools.accumulate(durations))
    _check_seconds(ends[-1], path, field)
    return Animation(path, first.size, _Timed([0.0, *ends[:-1]], ends[-1]), field)


@contextlib.contextmanager
def _open_container(path: Path, field: str) -> Iterator[Any]:
    # A file object: no protocol of FFmpeg's is ever used, whatever the content says.
    options = {"format_whitelist": DEMUXERS}
    with path.open("rb") as file:
        try:
            container = av.open(file, "r", options=options)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise InvalidValueError(
                f"{field}={path} cannot be read as a video ({_reason(error)}); give an MP4, MOV, MKV, WebM or AVI "
                "file, a directory of numbered images, or an animation",
                field=field,
            ) from error
        with container:
            yield container


def _video_stream(container: Any, path: Path, field: str) -> Any:
    streams = [each for each in container.streams.video if not getattr(each, "disposition", 0) & _COVER]
    if not streams:
        holds = "holds sound only" if container.streams.audio else "holds no video"
        raise InvalidValueError(f"{field}={path} {holds}; give a file with moving pictures", field=field)
    stream = streams[0]
    if stream.codec_context is None:
        raise InvalidValueError(f"{field}={path} is in a codec that is not known; convert it to H.264", field=field)
    _check_size(stream.codec_context.width, stream.codec_context.height, path, field)
    stream.thread_type = "AUTO"
    return stream


def _check_size(width: int, height: int, path: Path, field: str) -> None:
    if max(width, height) > SIDE_MAX or width * height > PIXELS_MAX:
        raise InvalidValueError(
            f"{field}={path} has pictures of {width}×{height}, more than {SIDE_MAX} on a side or {PIXELS_MAX} pixels; "
            "make it smaller",
            field=field,
        )


def _read_times(container: Any, stream: Any, path: Path, field: str) -> _Timed:
    """From the packets, without decoding."""
    with _read_errors(path, field):
        found = (
            (packet.pts, packet.dts, packet.duration or 0)
            for packet in container.demux(stream)
            if packet.size and not packet.is_discard
        )
        packets = list(itertools.islice(found, _PICTURES_MAX + 1))
    if len(packets) > _PICTURES_MAX:
        raise InvalidValueError(
            f"{field}={path} has more than {_PICTURES_MAX} pictures; cut a piece out of it", field=field
        )
    if not packets:
        raise InvalidValueError(f"{field}={path} has no frames; give another video", field=field)
    shown, decoded, durations = zip(*packets, strict=True)
    # AVI has no times of presentation, and FFmpeg's guesses repeat. Pictures leave a decoder one by one.
    stamps = next((each for each in (shown, decoded) if None not in each and len(set(each)) == len(each)), None)
    begin = _first_time(stamps or (*shown, *decoded), stream)
    if stamps is None or len(packets) == 1:
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        _check_seconds(len(packets) / rate if rate > 0 else -1, path, field)
        return _Timed([index / rate for index in range(len(packets))], len(packets) / rate, begin)
    seconds = [float((stamp - min(stamps)) * stream.time_base) for stamp in sorted(stamps)]
    usual = seconds[-1] / (len(seconds) - 1)
    last = float(durations[max(range(len(stamps)), key=stamps.__getitem__)] * stream.time_base)
    _check_seconds(seconds[-1] + last, path, field)
    return _Timed(seconds, seconds[-1] + (last or usual), begin)


def _first_time(stamps: Sequence[int | None], stream: Any) -> float:
    """The earliest of the known stamps in seconds; 0 where none is known."""
    known = [stamp for stamp in stamps if stamp is not None]
    return float(min(known) * stream.time_base) if known else 0.0


def _check_seconds(seconds: float, path: Path, field: str) -> None:
    """Raises InvalidValueError for a duration whose frames would not be listed soon: a damaged file may say years."""
    if not 0 <= seconds <= _SECONDS_MAX:
        raise InvalidValueError(
            f"{field}={path} is shown for {seconds:,.0f} s, more than {_SECONDS_MAX:,} s; cut a piece out of it",
            field=field,
        )


def _decode(container: Any, path: Path, field: str) -> Iterator[Image.Image]:
    """Yields the pictures as they are shown: turned by the file's metadata, with square pixels."""
    stream = _video_stream(container, path, field)
    ratio = stream.sample_aspect_ratio
    for frame in container.decode(stream):
        _check_size(frame.width, frame.height, path, field)  # a stream may change it
        image: Image.Image = frame.to_image()
        if ratio and ratio != 1:
            image = image.resize((max(1, round(image.width * ratio)), image.height), Image.Resampling.LANCZOS)
        yield _turn(image, _display_matrix(frame), path, field)


_Matrix = tuple[float, float, float, float]
_UPRIGHT: _Matrix = (1, 0, 0, 1)
_TURNS: dict[_Matrix, Image.Transpose] = {
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
"""By the display matrix: where the right and the lower neighbour of a pixel are shown, to the right and below."""


def _display_matrix(frame: Any) -> _Matrix:
    data = frame.side_data.get("DISPLAYMATRIX")  # PyAV before 14.1 lacks `rotation`, and no version reports mirroring
    if data is None:
        return _UPRIGHT
    a, b, _, c, d, *_ = (value / 65536 for value in struct.unpack("=9i", bytes(data)[:36]))
    return a, b, c, d


def _turn(image: Image.Image, matrix: _Matrix, path: Path, field: str) -> Image.Image:
    if matrix == _UPRIGHT:
        return image
    if matrix not in _TURNS:
        raise InvalidValueError(
            f"{field}={path} is turned by its metadata, and not by a multiple of 90 degrees; convert it", field=field
        )
    return image.transpose(_TURNS[matrix])


@contextlib.contextmanager
def _read_errors(path: Path, field: str) -> Iterator[None]:
    try:
        yield
    except InvalidValueError:
        raise
    except (av.error.FFmpegError, *IMAGE_ERRORS) as error:
        raise InvalidValueError(
            f"{field}={path} is damaged ({_reason(error)}); give another file", field=field
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"it is none of {', '.join(IMAGE_FORMATS)}"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _size_text(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
