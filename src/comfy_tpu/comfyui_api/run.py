"""A workflow from the queue to its results."""

from __future__ import annotations

import dataclasses
import os
import re
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from comfy_tpu.comfyui_api.client import Client, FailedError, Finished, Result, ServerError
from comfy_tpu.comfyui_api.workflow import Workflow
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.pipeline.atomic import write_errors
from comfy_tpu.pipeline.partial_files import open_partial, remove_abandoned

POLL_SECONDS = 0.5
_LOST_AFTER = 4
"""Requests in a row without an answer."""
_NAME_BYTES = 200
_ODD = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"|?*\u2028-\u202e\u2066-\u2069\ud800-\udfff]')


@dataclasses.dataclass(frozen=True)
class Outcome:
    prompt_id: str
    finished: Finished
    seconds: float


def check_timeout(timeout: object) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise InvalidValueError(f"timeout={timeout} is not allowed; give seconds, more than 0", field="timeout")
    return float(timeout)


def run_workflow(
    client: Client,
    workflow: Workflow,
    *,
    timeout: float,
    on_progress: Callable[[str], None] = lambda text: None,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Queues the workflow and waits for its end. Raises RefusedError, FailedError or ServerError.

    `timeout` is in seconds; what did not end by then goes on at the server.
    """
    began = clock()
    prompt_id = client.submit(workflow, uuid.uuid4().hex)
    said, failures = "", 0
    while True:
        try:
            finished = client.finished(prompt_id, workflow)
            text = None if finished is not None else _progress(client, prompt_id, workflow)
            failures = 0
        except ServerError as error:
            failures += 1
            finished, text = None, None
            if failures >= _LOST_AFTER:
                raise ServerError(f"the server was lost while the workflow ran: {error}") from error
        if finished is not None:
            return Outcome(prompt_id, finished, clock() - began)
        if text and text != said:
            on_progress(text)
            said = text
        if clock() - began > timeout:
            raise FailedError(
                f"timeout={timeout:g} seconds were over before the workflow was done; it goes on at the server as "
                f"{prompt_id}: cancel it there, or allow more",
                field="timeout",
            )
        pause(POLL_SECONDS)


def _progress(client: Client, prompt_id: str, workflow: Workflow) -> str | None:
    place = client.place_in_queue(prompt_id)
    if place is None:
        # It may have ended between the two questions.
        if client.finished(prompt_id, workflow) is None:
            raise FailedError(
                "the workflow is neither in the server's queue nor in its history; it was deleted there, or the server "
                "was started anew: run it again"
            )
        return None
    return f"waiting, {place} before it" if place else client.activity() or "running"


def fetch_results(client: Client, results: Collection[Result], directory: Path) -> list[Path]:
    """Brings the files into `directory`: all of them, or none. Whatever the server calls them, they are files directly
    in it; none that is there already is replaced."""
    if not results:
        return []
    with write_errors(directory):
        directory.mkdir(exist_ok=True)
        remove_abandoned(directory)
    with open_partial(directory, is_directory=True) as partial:
        for number, result in enumerate(results):
            with write_errors(directory), (partial / str(number)).open("wb") as file:
                for piece in client.read(result):
                    file.write(piece)
        with write_errors(directory):
            placed = _place_all(partial, [plain_name(result.filename) for result in results], directory)
            partial.rmdir()
    return placed


def plain_name(name: str) -> str:
    """A file name without a directory, from what a server calls a file."""
    last = re.split(r"[\\/]", name)[-1]
    cleaned = _ODD.sub("_", last).strip(" ").lstrip(".") or "result"
    stem, dot, suffix = cleaned.rpartition(".")
    if len(os.fsencode(cleaned)) > _NAME_BYTES:
        ending = f"{dot}{suffix}" if stem and len(os.fsencode(suffix)) <= 16 else ""
        cleaned = os.fsencode(stem or cleaned)[: _NAME_BYTES - 20].decode(errors="ignore") + ending
    return cleaned


def _place_all(partial: Path, names: list[str], directory: Path) -> list[Path]:
    placed: list[Path] = []
    try:
        for number, name in enumerate(names):
            source = partial / str(number)
            placed.append(_place(source, directory, name))
            source.unlink()
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        raise
    return placed


def _place(source: Path, directory: Path, name: str) -> Path:
    """Under its name, or the first like it that is free. A hard link: it follows no link, and replaces nothing."""
    stem, dot, suffix = name.rpartition(".")
    stem, ending = (stem, f"{dot}{suffix}") if stem else (name, "")
    for number in range(10_000):
        path = directory / (name if number == 0 else f"{stem}-{number}{ending}")
        try:
            os.link(source, path, follow_symlinks=False)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                continue
            source.rename(path)
            source.touch()  # which the caller removes
        return path
    raise ComfyTpuError(f"output={directory} has too many files like {name}; give an empty directory", field="output")
