"""Readers of pictures, videos, and of what our own outputs say of themselves."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
from hypothesis import strategies as st
from PIL import Image

from comfy_tpu.jobs.served_ledger import owners_path
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.images import PIXELS_MAX, read_image
from comfy_tpu.pipeline.sound_files import read_sound
from comfy_tpu.pipeline.video_files import open_video
from comfy_tpu.serving.recovery import open_ledger
from tests.fuzz.hostile_bytes import changed_value, dump, files, values
from tests.fuzz.model_readers import write
from tests.fuzz.reader import Case, named, reader

_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F")
_SAVED = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P", "RGB"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "TIFF": _MODES,
}


@functools.cache
def pictures() -> tuple[bytes, ...]:
    """One of each format and mode, 6×4."""
    drawn = np.random.default_rng(0).integers(0, 255, (4, 6, 3), dtype=np.uint8)
    found = []
    for name, modes in _SAVED.items():
        for mode in modes:
            image = Image.fromarray(drawn)
            image = image.convert("I") if mode == "I;16" else image.convert(mode)
            image = image.convert("I;16") if mode == "I;16" else image
            content = io.BytesIO()
            image.save(content, name)
            found.append(content.getvalue())
    return tuple(found)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@functools.cache
def bombs() -> tuple[bytes, ...]:
    """PNGs that say that they are large, with a few bytes of pixels; texts that inflate; and one of many pixels."""
    found = []
    for width, height in ((60_000, 60_000), (2**31 - 1, 1), (1, 2**31 - 1), (0, 0), (16_385, 1), (16_000, 16_000)):
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        pixels = zlib.compress(bytes(1000))
        found.append(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b""))
    text = _chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(70_000_000), 9))
    small = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    found.append(
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", small)
        + text
        + _chunk(b"IDAT", zlib.compress(bytes(4)))
        + _chunk(b"IEND", b"")
    )
    return tuple(found)


def _picture_files() -> st.SearchStrategy[Case]:
    return named("picture.png", st.one_of(files(*pictures()), files(*pictures()), st.sampled_from(bombs())))


@reader("pipeline.image_files", "pipeline.images", cases=_picture_files)
def read_picture(directory: Path, _: Any, case: Case) -> None:
    image = read_image(write(directory, case))
    assert image.mode == "RGB"
    assert 0 < image.width * image.height <= PIXELS_MAX


@functools.cache
def clips() -> tuple[bytes, ...]:
    frames = [np.full((16, 16, 3), 20 * number, np.uint8) for number in range(4)]
    found = []
    for container, codec in (("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4")):
        content = io.BytesIO()
        with av.open(content, "w", format=container) as opened:
            stream = opened.add_stream(codec, rate=8)
            stream.width = stream.height = 16
            stream.pix_fmt = "yuv420p"
            for frame in frames:
                opened.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            opened.mux(stream.encode(None))
        found.append(content.getvalue())
    for name in ("GIF", "WEBP", "PNG"):
        content = io.BytesIO()
        first, *rest = (Image.fromarray(frame) for frame in frames)
        first.save(content, name, save_all=True, append_images=rest, duration=100)
        found.append(content.getvalue())
    return tuple(found)


@reader("pipeline.video_files", cases=lambda: named("clip.mp4", files(*clips())), share=0.5)
def read_video(directory: Path, _: Any, case: Case) -> None:
    video = open_video(write(directory, case), "init_video")
    assert video.count(16.0) >= 1
    for number, frame in enumerate(video.frames(16.0)):
        assert frame.mode == "RGB"
        if number > 8:
            break
    video.digest()


@functools.cache
def sounds() -> tuple[bytes, ...]:
    """A second of silence in two containers."""
    found = []
    for container, codec in (("mp4", "aac"), ("matroska", "aac")):
        content = io.BytesIO()
        with av.open(content, "w", format=container) as opened:
            stream = opened.add_stream(codec, rate=8000)
            for number in range(4):
                frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                frame.sample_rate, frame.pts = 8000, 1024 * number
                opened.mux(stream.encode(frame))
            opened.mux(stream.encode(None))
        found.append(content.getvalue())
    return tuple(found)


_PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n"


@reader("pipeline.sound_files", cases=lambda: named("clip.mp4", files(*sounds(), *clips(), _PLAYLIST)), share=0.5)
def read_sound_track(directory: Path, _: Any, case: Case) -> None:
    sound = read_sound(write(directory, case), "video")
    assert sound is None or sound.samples.isfinite().all()


def _frame_names() -> st.SearchStrategy[Case]:
    names = st.text(st.sampled_from("0123456789abé٣²._- "), min_size=1, max_size=12)
    suffixes = st.sampled_from((".png", ".PNG", ".jpg", ".txt", ".gif"))
    chosen = st.sampled_from((*pictures()[:4], b"", b"x"))
    return st.builds(lambda content, name, suffix: Case(content, f"{name}{suffix}"), chosen, names, suffixes)


def _make_frames(directory: Path) -> Path:
    (directory / "frames").mkdir()
    (directory / "frames" / "frame_0001.png").write_bytes(pictures()[4])
    return directory / "frames"


@reader("pipeline.video_files", cases=_frame_names, prepare=_make_frames)
def read_frame_directory(_: Path, frames: Path, case: Case) -> None:
    path = frames / case.name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(case.content)
    try:
        video = open_video(frames, "init_video")
        assert sum(1 for _ in video.frames(16.0)) == video.count(16.0)
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)


_DESCRIBED = {"prompt": "a red circle", "seed": "1", "settings": "{}", "model": "demo", "model_fingerprint": "ab12"}
_OUTPUTS = ("mp4", "png", "gif", "webp")


@functools.cache
def _output(kind: str, comment: bytes) -> bytes:
    content = io.BytesIO()
    text = comment.decode("utf-8", "replace")
    if kind == "mp4":
        with av.open(content, "w", format="mp4") as opened:
            opened.metadata["comment"] = text
            stream = opened.add_stream("mpeg4", rate=8)
            stream.width = stream.height = 16
            stream.pix_fmt = "yuv420p"
            opened.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
            opened.mux(stream.encode(None))
        return content.getvalue()
    image = Image.new("RGB", (2, 2))
    if kind == "png":
        from PIL.PngImagePlugin import PngInfo

        texts = PngInfo()
        texts.add_text("Comment", text)
        image.save(content, "PNG", pnginfo=texts)
    else:
        image.save(content, kind.upper(), **({"comment": comment[:250]} if kind == "gif" else {}))
    return content.getvalue()


def _described_outputs() -> st.SearchStrategy[Case]:
    good = {kind: _output(kind, dump(_DESCRIBED)) for kind in _OUTPUTS}
    damaged = st.sampled_from(_OUTPUTS).flatmap(lambda kind: named(f"out.{kind}", files(good[kind])))
    comments = st.one_of(changed_value(_DESCRIBED), values).map(dump)
    said = st.builds(
        lambda kind, said: Case(_output(kind, said), f"out.{kind}"), st.sampled_from(("png", "gif")), comments
    )
    return st.one_of(damaged, said)


@reader("pipeline.media", "pipeline.video_formats", cases=_described_outputs)
def read_output_metadata(directory: Path, _: Any, case: Case) -> None:
    """Of a file that is there already, which may be anybody's."""
    found = media.find_metadata(write(directory, case))
    assert isinstance(found, dict)
    media.read_metadata(directory / case.name)


@reader("serving.recovery", cases=_described_outputs)
def read_finished_job(directory: Path, _: Any, case: Case) -> None:
    """Of a server whose ledger is gone. Whatever the file says, it is a finished job, with the owner that is known."""
    name = f"image_{'0' * 24}.png" if case.name.endswith("png") else f"video_{'0' * 24}.mp4"
    place = write(directory, Case(case.content, name))
    owners_path(directory / "jobs.db").write_bytes(case.content[:200])
    open_ledger(directory / "jobs.db", directory).close()
    for path in directory.glob("jobs.db*"):
        path.unlink()
    place.unlink()
