"""Reads and writes video files. The name determines the format:

    video.mp4               H.264, with the metadata as title and comment, and the sound as AAC
    video.gif               loops, with the metadata as comment
    video.npy               uint8 [frames, height, width, 3], without metadata
    frames/                 frames/frame_0000.png and so on; also the name of a directory that exists
    frames/f-%04d.png       the same under another name
    image.png               a video of one frame

Of several videos, video.mp4 becomes video-0.mp4, video-1.mp4, …, and frames/ becomes frames/video-0/ and so on.
A sequence of frames replaces the one of the same name as a whole: older frames beyond its end are removed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import av.error
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from comfy_tpu.config import GenerationSettings
from comfy_tpu.errors import CheckpointError, ComfyTpuError, InvalidValueError
from comfy_tpu.finite import is_finite
from comfy_tpu.json_input import parse_json
from comfy_tpu.pipeline import atomic
from comfy_tpu.pipeline.frame_names import (
    FRAME_NAME,
    NUMBER,
    frame_name_pattern,
    insert_number,
    is_sequence,
    number_videos,
)
from comfy_tpu.pipeline.image_files import IMAGE_ERRORS, quiet_images
from comfy_tpu.pipeline.sound import Waveform
from comfy_tpu.pipeline.video_formats import (
    Encoder,
    Frame,
    Gif,
    Mp4,
    Npy,
    Png,
    PngSequence,
    read_comment,
    write_png,
)

logger = logging.getLogger(__name__)

_FORMATS: Mapping[str, type[Encoder]] = {".mp4": Mp4, ".gif": Gif, ".npy": Npy, ".png": Png}
_SOUND_FORMAT = ".mp4"
_CHOICES = "video.mp4, video.gif, video.npy, frames/ or frames/%04d.png"


def output_paths(output: str | Path, num_videos: int = 1) -> tuple[Path, ...]:
    """The path of each video. The path of a sequence of frames has %d for the frame's number."""
    return number_videos(_full_path(output), num_videos)


def free_output(output: str | Path, num_videos: int) -> Path:
    """`output`, with -1, -2, … after its stem if needed, so that no existing file is replaced."""
    output = Path(output)
    for count in itertools.count():
        candidate = output.with_stem(f"{output.stem}-{count}") if count else output
        if not any(path.exists() for path in output_paths(candidate, num_videos)):
            return candidate
    raise AssertionError("counting has no end")


def check_output(output: str | Path, settings: GenerationSettings | None = None) -> tuple[Path, ...]:
    """The paths of videos with these settings; raises InvalidValueError if they could not be written. Writes nothing.

    Without settings, only the name is checked.
    """
    paths = output_paths(output, settings.num_videos if settings else 1)
    for path in paths:
        atomic.check_name(path.with_name(insert_number(path.name, settings.num_frames - 1 if settings else 0)))
        # The directory of each sequence among several is one level deeper, and ours to make.
        atomic.check_place(path, new_directories=2 if len(paths) > 1 and is_sequence(path) else 1)
        if is_sequence(path):
            atomic.check_sequence(path.parent, frame_name_pattern(path.name))
    if settings is None:
        return paths
    if paths[0].suffix == ".png" and not is_sequence(paths[0]) and settings.num_frames > 1:
        raise InvalidValueError(
            f"output={output} is one image and the video has {settings.num_frames} frames; write "
            f"{Path(output).with_stem(Path(output).stem + '-%04d')}, or ask for num_frames=1",
            field="output",
        )
    _check_space(paths, settings)
    return paths


def check_contact_sheet(path: Path) -> None:
    """Raises InvalidValueError if a contact sheet could not be written. Writes nothing."""
    if path.suffix != ".png":
        raise InvalidValueError(f"contact_sheet={path} is an image; give it a name in .png", field="contact_sheet")
    atomic.check_place(path, field="contact_sheet")


@contextlib.contextmanager
def open_writer(
    output: str | Path, *, fps: int, metadata: Mapping[str, str], sound: Waveform | None = None
) -> Iterator[FrameWriter]:
    """Opens a writer. The video is at its place when the block ends; if the block raises, nothing has changed."""
    with open_writers(output_paths(output), fps=fps, metadata=[metadata], sound=sound) as (writer,):
        yield writer


@contextlib.contextmanager
def open_writers(
    paths: Sequence[Path], *, fps: int, metadata: Sequence[Mapping[str, str]], sound: Waveform | None = None
) -> Iterator[tuple[FrameWriter, ...]]:
    """Opens writers of several videos: all of them are at their places when the block ends, or none. `sound`: those of
    the videos; formats without sound leave it out, and the log says so."""
    if sound is not None and paths and paths[0].suffix != _SOUND_FORMAT:
        logger.warning(
            "output=%s is written without the video's sound; write %s to have it",
            paths[0],
            paths[0].with_suffix(_SOUND_FORMAT).name,
            extra={"field": "output"},
        )
        sound = None
    with contextlib.ExitStack() as placing, contextlib.ExitStack() as encoding:
        # All encoders finish before the first video is moved to its place.
        partials = [placing.enter_context(_open_partial(path)) for path in paths]
        yield tuple(
            encoding.enter_context(
                _open_frame_writer(path, partial, fps, texts, None if sound is None else sound.row(number))
            )
            for number, (path, partial, texts) in enumerate(zip(paths, partials, metadata, strict=True))
        )


class FrameWriter:
    """Writes frames to a partial file."""

    def __init__(self, path: Path, open_encoder: Callable[[], Encoder]) -> None:
        self._path = path
        with atomic.write_errors(path):
            self._encoder = open_encoder()
        self._size: tuple[int, ...] | None = None

    def write(self, frames: Float[Tensor, "t height width 3"]) -> None:
        """Writes frames in 0..1; values beyond are clipped."""
        for frame in _as_bytes(frames):
            if self._size not in (None, frame.shape):
                raise InvalidValueError(f"a frame of {frame.shape} follows frames of {self._size}; give equal sizes")
            self._size = frame.shape
            with atomic.write_errors(self._path):
                self._encoder.add(frame)

    def finish(self) -> None:
        if self._size is None:
            raise InvalidValueError(f"output={self._path} got no frames; a video has one at least", field="output")
        with atomic.write_errors(self._path):
            self._encoder.finish()

    def abandon(self) -> None:
        self._encoder.abandon()


def write_videos(
    paths: Sequence[Path],
    chunks: Iterable[Float[Tensor, "videos t height width 3"]],
    *,
    fps: int,
    metadata: Sequence[Mapping[str, str]],
    sheet: Path | None = None,
    sound: Waveform | None = None,
) -> None:
    """Writes the frames of all videos as they are decoded; `sheet`: an image of every second frame of the first video,
    or of every fourth, eighth, … of a long one."""
    contact = ContactSheet(every=2, most=_CELLS_MAX)
    with open_writers(paths, fps=fps, metadata=metadata, sound=sound) as writers:
        for chunk in chunks:
            for writer, frames in zip(writers, chunk, strict=True):
                writer.write(frames)
            if sheet:
                contact.add(chunk[0])
        if sheet:
            with atomic.replacing(sheet) as partial, atomic.write_errors(sheet), partial.open("wb") as file:
                write_png(file, contact.image(), metadata[0])


_CELLS_MAX = 129
"""The most frames on a contact sheet: 257 frames, every second one. They are kept until the video ends."""


class ContactSheet:
    """An image of frames in rows. Frames are kept at a width of at most 256."""

    def __init__(self, columns: int = 5, every: int = 1, most: int | None = None) -> None:
        """`most`: beyond it, every second frame is dropped, of those that are kept and of those that come."""
        self._columns = columns
        self._every = every
        self._most = most
        self._seen = 0
        self._cells: list[Image.Image] = []

    def add(self, frames: Float[Tensor, "t height width 3"]) -> None:
        for frame in _as_bytes(frames):
            if self._seen % self._every == 0:
                self._cells.append(_resize_cell(Image.fromarray(frame)))
            self._seen += 1
            if self._most is not None and len(self._cells) > self._most:
                self._cells = self._cells[::2]
                self._every *= 2

    def image(self) -> Image.Image:
        if not self._cells:
            raise InvalidValueError("a contact sheet got no frames; it shows one at least")
        width, height = self._cells[0].size
        columns = min(self._columns, len(self._cells))
        rows = -(-len(self._cells) // columns)
        gap = 2
        sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), "white")
        for index, cell in enumerate(self._cells):
            row, column = divmod(index, columns)
            sheet.paste(cell, (gap + column * (width + gap), gap + row * (height + gap)))
        return sheet


def contact_sheet(frames: Float[Tensor, "t height width 3"], columns: int = 5) -> Image.Image:
    sheet = ContactSheet(columns)
    sheet.add(frames)
    return sheet.image()


def read_metadata(output: str | Path) -> dict[str, str]:
    """The metadata that a video was written with; empty if the file has none of ours, as .npy files."""
    path = _full_path(output)
    if path.suffix == ".npy":
        return {}
    path = path.with_name(insert_number(path.name, 0))
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file; expected one that comfy-tpu wrote")
    try:
        with quiet_images():
            found = parse_json(read_comment(path) or "{}")
    except ValueError:  # a comment of another program; av's InvalidDataError, too, is a ValueError
        return {}
    except (av.error.FFmpegError, *IMAGE_ERRORS) as error:
        raise CheckpointError(f"{path} cannot be read as {path.suffix[1:]} ({error}); write it again") from error
    return found if isinstance(found, dict) else {}


def find_metadata(path: Path, num_frames: int = 1) -> dict[str, str]:
    """The metadata of a video; empty if it is missing or damaged, and for a sequence that lacks a frame, or whose
    frames are not all from the same video."""
    frames = [path.with_name(insert_number(path.name, number)) for number in range(num_frames)]
    try:
        found, *others = [read_metadata(frame) for frame in (frames if is_sequence(path) else [path])]
    except CheckpointError:
        return {}
    return found if all(other == found for other in others) else {}


def _full_path(output: str | Path) -> Path:
    path = Path(output)
    atomic.check_name(path)
    if str(output).endswith(os.sep) or (path.is_dir() and path.suffix not in _FORMATS):
        return path / FRAME_NAME
    if path.suffix not in _FORMATS:
        raise InvalidValueError(f"output={output} names no format; write {_CHOICES}", field="output")
    if path.suffix == ".png" and len(NUMBER.findall(path.name)) > 1:
        raise InvalidValueError(f"output={output} has two places for the frame's number; leave one", field="output")
    return path


def _check_space(paths: Sequence[Path], settings: GenerationSettings) -> None:
    place = next(place for place in Path(os.path.realpath(paths[0])).parents if place.exists())
    free = shutil.disk_usage(place).free
    pixels = settings.num_videos * settings.num_frames * settings.height * settings.width
    needed = pixels * _FORMATS[paths[0].suffix].bytes_per_pixel
    if free < needed:
        raise InvalidValueError(
            f"output={paths[0]} needs {needed / 2**20:.1f} MiB at least and {place} has {free / 2**20:.1f} MiB free; "
            "free some space or choose another place",
            field="output",
        )


@contextlib.contextmanager
def _open_partial(path: Path) -> Iterator[Path]:
    if not is_sequence(path):
        with atomic.replacing(path) as partial:
            yield partial
        return
    with atomic.replacing_sequence(path.parent, frame_name_pattern(path.name)) as partial:
        yield partial


@contextlib.contextmanager
def _open_frame_writer(
    path: Path, partial: Path, fps: int, metadata: Mapping[str, str], sound: Waveform | None
) -> Iterator[FrameWriter]:
    encoder: Callable[..., Encoder] = _FORMATS[path.suffix]
    if sound is not None:
        encoder = functools.partial(Mp4, sound=sound)
    if is_sequence(path):
        encoder = functools.partial(PngSequence, name=path.name)
    writer = FrameWriter(path, lambda: encoder(partial, fps, metadata))
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _as_bytes(frames: Float[Tensor, "t height width 3"]) -> Iterator[Frame]:
    if frames.ndim != 4 or frames.shape[-1] != 3 or not frames.is_floating_point():
        raise InvalidValueError(
            f"frames are {frames.dtype} {list(frames.shape)}, expected floats [t, height, width, 3]", field="frames"
        )
    for frame in frames.detach():
        if not is_finite(frame):
            raise ComfyTpuError("a frame holds values that are not numbers; try dtype float32, or report it")
        yield frame.float().mul(255).round_().clamp_(0, 255).to(torch.uint8).contiguous().numpy()


def _resize_cell(image: Image.Image) -> Image.Image:
    if image.width > 256:
        return image.resize((256, max(1, round(image.height * 256 / image.width))), Image.Resampling.LANCZOS)
    scale = max(1, 128 // image.width)  # a frame of 64 pixels is a stamp on today's screens
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
