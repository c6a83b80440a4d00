"""Encodes and uploads videos in a thread of its own, while the next ones are computed."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from comfy_tpu.config import GenerationSettings
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Job, OutputFile
from comfy_tpu.jobs.outcome import Outcome, outcome_of_error
from comfy_tpu.parallel import hosts
from comfy_tpu.pipeline import media
from comfy_tpu.pipeline.embeddings import PromptEmbeddings
from comfy_tpu.pipeline.frame_names import frame_name_pattern
from comfy_tpu.pipeline.given_media import NO_MEDIA, GivenMedia
from comfy_tpu.pipeline.sound import Waveform

_CHUNKS_AHEAD = 2
"""Decoded parts of a video that may wait for the writer."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A job on its way, with what only it has."""

    job: Job
    settings: GenerationSettings
    paths: tuple[str, ...]
    """Of its videos, inside the directory."""
    embeddings: PromptEmbeddings
    metadata: Mapping[str, str]
    given: GivenMedia = NO_MEDIA
    """What a second pass encodes again."""
    factor: int = 1
    """Of its frames per second, where frames are made between those of the model."""
    resumed_after: int = 0
    """As in `Outcome`."""


@dataclasses.dataclass
class _Writing:
    """Rows whose frames are being written."""

    rows: Sequence[Row]
    started: float
    chunks: queue.Queue[torch.Tensor | BaseException | None]
    seconds: dict[str, float]
    sound: Waveform | None
    is_decoded: bool = False
    """Whether the last chunk was taken: nothing more comes."""

    def take_chunks(self) -> Iterator[torch.Tensor]:
        while (chunk := self.chunks.get()) is not None:
            if isinstance(chunk, BaseException):
                self.is_decoded = True
                raise _DecodeError from chunk
            yield chunk
        self.is_decoded = True


class Writer:
    """Writes the videos of one group after the other, and reports the outcomes."""

    def __init__(self, folder: Folder, on_outcome: Callable[[Outcome], None]) -> None:
        self._folder = folder
        self._on_outcome = on_outcome
        self._writings: queue.Queue[_Writing | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._write_all, name="writer")
        self._thread.start()

    def write(
        self,
        rows: Sequence[Row],
        parts: Iterable[torch.Tensor],
        *,
        started: float,
        seconds: dict[str, float],
        sound: Waveform | None = None,
    ) -> None:
        """Takes frames as they are decoded, [rows, t, height, width, 3], and returns after the last of them.

        An error of `parts` is raised, and no outcome is reported then. `started`: when the work on the rows began.
        `seconds`: by stage; that of decoding is added.
        """
        chunks: queue.Queue[torch.Tensor | BaseException | None] = queue.Queue(maxsize=_CHUNKS_AHEAD)
        self._writings.put(_Writing(rows, started, chunks, seconds, sound))
        begun = time.monotonic()
        try:
            for part in parts:
                chunks.put(part)
        except BaseException as error:
            chunks.put(error)
            raise
        seconds["decoding"] = time.monotonic() - begun
        chunks.put(None)

    def close(self) -> None:
        """Waits until all files are written."""
        if self._thread.is_alive():
            self._writings.put(None)
            self._thread.join()

    def _write_all(self) -> None:
        while (writing := self._writings.get()) is not None:
            try:
                placed = self._write(writing)
            except _DecodeError:
                continue  # the thread that decodes reports it
            except Exception as error:  # noqa: BLE001
                for row in writing.rows if self._drain(writing) else ():
                    self._on_outcome(outcome_of_error(row.job.id, error))
                continue
            seconds = {**writing.seconds, "total": time.monotonic() - writing.started}
            for row, outputs in zip(writing.rows, placed, strict=True):
                done = Outcome(row.job.id, "done", outputs, cut=row.embeddings.cut, seconds=seconds)
                self._on_outcome(dataclasses.replace(done, resumed_after=row.resumed_after))

    @staticmethod
    def _drain(writing: _Writing) -> bool:
        """Takes what the decoder would wait for ever to hand over. Whether it decoded everything."""
        try:
            for _ in () if writing.is_decoded else writing.take_chunks():
                pass
        except _DecodeError:
            return False
        return True

    def _write(self, writing: _Writing) -> list[tuple[OutputFile, ...]]:
        rows = writing.rows
        if not hosts.is_first_host():
            for _ in writing.take_chunks():  # the first host writes what all of them compute
                pass
            return [() for _ in rows]
        sheet = rows[0].job.request.values.get("contact_sheet")
        with self._folder.writing() as directory:
            paths = [directory / name for row in rows for name in row.paths]
            for name in (*(name for row in rows for name in row.paths), *([] if sheet is None else [sheet])):
                self._folder.check_inside(directory, name)
            media.write_videos(
                paths,
                (chunk[: len(paths)] for chunk in writing.take_chunks()),
                fps=rows[0].settings.fps * rows[0].factor,
                metadata=[{**row.metadata, "video": str(index)} for row in rows for index in range(len(row.paths))],
                sheet=None if sheet is None else directory / sheet,
                sound=writing.sound,
            )
            files = [
                self._folder.place(directory, [name for path in row.paths for name in _list_files(directory, path)])
                for row in rows
            ]
            if sheet is not None:
                files[0] += self._folder.place(directory, [sheet])
        return [tuple(each) for each in files]


class _DecodeError(Exception):
    """Frames that will not come."""


def _list_files(directory: Path, name: str) -> list[str]:
    """The files of an output: one, or the frames of a sequence."""
    if "%" not in name:
        return [name]
    place, pattern = directory / Path(name).parent, frame_name_pattern(Path(name).name)
    return sorted(path.relative_to(directory).as_posix() for path in place.iterdir() if pattern.fullmatch(path.name))
