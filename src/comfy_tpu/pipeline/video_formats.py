"""Encoders of video files, one class per format. Each writes frames as they come, and holds a few of them at most."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import av
import av.error
import numpy as np
import numpy.typing as npt
from PIL import GifImagePlugin, Image, PngImagePlugin

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.pipeline.frame_names import insert_number
from comfy_tpu.pipeline.image_files import open_image_file
from comfy_tpu.pipeline.sound import Waveform

Frame = npt.NDArray[np.uint8]
"""[height, width, 3]"""

Metadata = Mapping[str, str]


class Encoder(Protocol):
    bytes_per_pixel: ClassVar[float]
    """A lower bound of a video's size, by which a disk without enough space is found before a run."""

    def __init__(self, partial: Path, fps: int, metadata: Metadata) -> None: ...

    def add(self, frame: Frame) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None:
        """Closes the file, which the caller removes."""


class Mp4:
    """H.264, 4:2:0, with the index first, so that a browser can start before the download ends; the sound is AAC."""

    bytes_per_pixel: ClassVar = 0.002

    def __init__(self, partial: Path, fps: int, metadata: Metadata, sound: Waveform | None = None) -> None:
        self._container = av.open(str(partial), "w", format="mp4", options={"movflags": "+faststart"})
        self._container.metadata["title"] = metadata.get("prompt", "")
        self._container.metadata["comment"] = format_comment(metadata)
        self._stream = self._container.add_stream("libx264", rate=fps, options=_X264_OPTIONS)
        self._stream.codec_context.thread_type = "FRAME"
        self._sound = sound
        # Now: a container knows its streams before the first of their packets.
        self._sound_stream = None if sound is None else self._add_sound_stream(sound)

    def _add_sound_stream(self, sound: Waveform) -> av.AudioStream:
        stream = self._container.add_stream("aac", rate=sound.rate, options=_AAC_OPTIONS)
        stream.codec_context.layout = "mono" if sound.samples.shape[1] == 1 else "stereo"
        return stream

    def _write_sound(self, sound: Waveform, stream: av.AudioStream) -> None:
        samples = sound.samples[0].float().clamp(-1, 1).contiguous().numpy()
        for begin in range(0, samples.shape[1], _AAC_FRAME):
            part = np.ascontiguousarray(samples[:, begin : begin + _AAC_FRAME])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=stream.codec_context.layout.name)
            frame.sample_rate, frame.pts, frame.time_base = sound.rate, begin, Fraction(1, sound.rate)
            self._container.mux(stream.encode(frame))
        self._container.mux(stream.encode(None))

    def add(self, frame: Frame) -> None:
        # 4:2:0 has one colour sample for 2×2 pixels. An odd side gets its last row or column twice.
        frame = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        if not self._stream.codec_context.is_open:
            self._stream.height, self._stream.width = frame.shape[:2]
            self._stream.pix_fmt = "yuv420p"
            # Without a word on it players take BT.601 for small videos and BT.709 for large ones; the colours differ.
            context = self._stream.codec_context
            context.color_primaries = context.color_trc = context.colorspace = _BT709
            context.color_range = _LIMITED
            if self._sound is not None and self._sound_stream is not None:
                # All of it before the first frame: the muxer keeps packets until it has one of every stream, and five
                # seconds of sound are 120 kB.
                self._write_sound(self._sound, self._sound_stream)
        encoded = av.VideoFrame.from_ndarray(frame, format="rgb24")
        encoded = encoded.reformat(format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED)
        self._container.mux(self._stream.encode(encoded))

    def finish(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def abandon(self) -> None:
        with contextlib.suppress(av.error.FFmpegError):  # it writes the index on closing: the disk may be full
            self._container.close()


_AAC_OPTIONS = {"b": "192k"}
_AAC_FRAME = 1024

_X264_OPTIONS = {
    # Not x264's 23: demo videos have 64 pixels a side, where every artefact is a pixel large.
    "crf": "16",
    # The macroblock tree reads memory that x264 never wrote: one video of 832×480×81 had 1,414,959 bytes in one run and
    # 1,417,105 in the next. Without it a filmed video of that size needs 10 % more bytes at the same PSNR.
    "mbtree": "0",
    # By default as many as the machine has cores, and each number gives other bytes. Eight that encode frames side by
    # side give files of one thread's size (-0.1 % to +0.4 %), unlike eight that share a frame (+0.8 to +1.2 %).
    "threads": "8",
}
"""The file is a function of the frames, whatever the machine's memory and cores."""

_BT709 = 1
_LIMITED = 1
"""16 to 235, which is what players expect of 4:2:0 video."""


class Gif:
    """Loops for ever. A palette of 256 colours for each frame: one for all would have to be chosen before the rest."""

    bytes_per_pixel: ClassVar = 0.01

    def __init__(self, partial: Path, fps: int, metadata: Metadata) -> None:
        self._file = partial.open("wb")
        self._fps = fps
        self._comment = format_comment(metadata).encode()
        self._count = 0

    def add(self, frame: Frame) -> None:
        image = Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE)
        if not self._count:
            header, _ = GifImagePlugin.getheader(image.copy(), info={"loop": 0, "comment": self._comment})
            self._file.writelines(header)
        duration = 10 * (self._centiseconds(self._count + 1) - self._centiseconds(self._count))
        self._file.writelines(GifImagePlugin.getdata(image, duration=duration, include_color_table=True))
        self._count += 1

    def _centiseconds(self, frame: int) -> int:
        """The start of a frame in hundredths of a second, as GIF counts: 16 fps are 6, 6, 7, 6 … and not always 6.

        A frame takes two at least: browsers show faster animations at 10 fps.
        """
        return round(100 * frame / min(self._fps, 50))

    def finish(self) -> None:
        self._file.write(b";")
        self._file.close()

    def abandon(self) -> None:
        _close(self._file)


class Npy:
    """uint8 [frames, height, width, 3], without metadata."""

    bytes_per_pixel: ClassVar = 3.0

    def __init__(self, partial: Path, fps: int, metadata: Metadata) -> None:
        self._file = partial.open("wb")
        self._size: tuple[int, ...] = ()
        self._count = 0
        self._data_start = 0

    def add(self, frame: Frame) -> None:
        if not self._count:
            self._size = frame.shape
            self._write_header()
            self._data_start = self._file.tell()
        self._file.write(np.ascontiguousarray(frame).data)
        self._count += 1

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()
        # NumPy's header leaves room for the first axis to grow; were that to change, the header would reach into data.
        if self._file.tell() != self._data_start:
            raise RuntimeError(f"the header of a .npy file grew from {self._data_start} to {self._file.tell()} bytes")
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": "|u1", "fortran_order": False, "shape": (self._count, *self._size)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def abandon(self) -> None:
        _close(self._file)


class Png:
    """One image."""

    bytes_per_pixel: ClassVar = 0.05

    def __init__(self, partial: Path, fps: int, metadata: Metadata) -> None:
        self._file = partial.open("wb")
        self._metadata = metadata

    def add(self, frame: Frame) -> None:
        if self._file.tell():
            raise InvalidValueError(
                "output is one image, and got a second frame; give it a name with %04d", field="output"
            )
        write_png(self._file, Image.fromarray(frame), self._metadata)

    def finish(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        _close(self._file)


class PngSequence:
    """Numbered images in a directory; each holds the metadata."""

    bytes_per_pixel: ClassVar = 0.05

    def __init__(self, partial: Path, fps: int, metadata: Metadata, name: str) -> None:
        self._directory = partial
        self._metadata = metadata
        self._name = name
        self._count = 0

    def add(self, frame: Frame) -> None:
        with (self._directory / insert_number(self._name, self._count)).open("wb") as file:
            write_png(file, Image.fromarray(frame), self._metadata)
        self._count += 1

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def format_comment(metadata: Metadata) -> str:
    """The metadata as one JSON object, for the comment: the only tag that every format and player has."""
    return json.dumps(dict(metadata), ensure_ascii=False)


def write_png(file: IO[bytes], image: Image.Image, metadata: Metadata) -> None:
    texts = PngImagePlugin.PngInfo()
    # Not "prompt", which ComfyUI takes for a workflow when the image is dropped on it.
    texts.add_text("Title", metadata.get("prompt", ""))
    texts.add_text("Comment", format_comment(metadata))
    image.save(file, "PNG", pnginfo=texts)


def read_comment(path: Path) -> Any:
    """The comment's content, or None. The file is read in the format of its suffix: others may refer to other files or
    start programs, as playlists and PostScript do."""
    with path.open("rb") as file:
        if path.suffix == ".mp4":
            with av.open(file, format="mp4") as container:
                return container.metadata.get("comment")
        with open_image_file(file, [path.suffix[1:].upper()]) as image:
            found = image.info.get("Comment" if path.suffix == ".png" else "comment")
    return found.decode() if isinstance(found, bytes) else found


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # what is still in the buffer may not fit either
        file.close()
