"""Carries out one stage on a server: sends its input, follows its progress, fetches its result.

A server that goes away is waited for: its jobs are in a ledger on its disk, and go on when it is started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.pipeline.progress import Progress, ProgressCallback, ignore_progress
from comfy_tpu.remote.client import Check, RefusedError, ServerClient, UnreachableError

WAIT_SECONDS = 60.0
STAGES_PATH = "/v1/stages"
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_CANCEL_SECONDS = 3.0
_PREVIEW_BYTES_MAX = 2**28
_FINAL = ("completed", "failed", "cancelled")
_PROGRESS_FIELDS = {field.name: field.type for field in dataclasses.fields(Progress) if field.name != "preview"}

_Result = TypeVar("_Result")


class LostError(ComfyTpuError):
    """The server went away, and did not come back in time."""


class FailedError(ComfyTpuError):
    """The server began the stage, and did not come to its end."""


def _do_nothing() -> None:
    pass


@dataclasses.dataclass
class Callbacks:
    """What a runner calls, in the thread that called it. Any of them may raise an exception to cancel the stage."""

    on_progress: ProgressCallback = ignore_progress
    check: Callable[[], None] = _do_nothing
    """Often, also while nothing happens."""
    on_waiting: Callable[[float], None] = lambda seconds: None
    """While the server does not answer: for how long."""
    read_preview: Callable[[bytes], Any] | None = None
    """Makes latents of a preview's content. None: previews are not wanted."""


class StageRunner:
    def __init__(self, client: ServerClient, callbacks: Callbacks, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._client, self._callbacks, self._wait_seconds = client, callbacks, wait_seconds
        self._position = ""
        """How far the stage has come, for messages."""
        self._last: Progress | None = None

    def ask(self, path: str) -> dict[str, Any]:
        return self._patiently(lambda check: self._client.ask("GET", path))

    def run(self, stage: str, content: bytes, most_bytes: int, end: Progress | None = None) -> bytes:
        """The content of the stage's result. `end`: what is reported at its end, which events may come too late for."""
        self._position, self._last = f"before {stage} began", None
        self._patiently(lambda check: self._cancel_abandoned())
        # The same key at every attempt: a body whose answer was lost is not a second job.
        headers = {"Content-Type": "application/x-safetensors", "Idempotency-Key": secrets.token_hex(16)}
        post = f"{STAGES_PATH}/{stage}"
        job = self._patiently(
            lambda check: self._client.ask("POST", post, content, headers, check),
            undo=lambda job: self._cancel(str(job.get("id"))),
        )
        id_ = str(job.get("id"))
        path = f"{STAGES_PATH}/{id_}"
        try:
            final = self._follow(path)
            if final.get("status") != "completed":
                raise FailedError(_failure(self._client, final))
            self._report_end(end)
            result = self._patiently(lambda check: self._client.download(f"{path}/content", most_bytes, check))
        except BaseException as error:
            self._end(id_, is_lost=isinstance(error, LostError))
            raise
        with contextlib.suppress(ComfyTpuError):  # the server removes it by itself after a while
            self._in_thread(lambda check: self._client.ask("DELETE", path))
        return result

    def _follow(self, path: str) -> dict[str, Any]:
        """The last event of a job."""
        while True:
            last: dict[str, Any] = {}
            try:
                for last, is_newest in self._events(path):
                    self._report(path, last, is_newest)
            except UnreachableError:
                pass
            except RefusedError as error:
                raise self._forgotten(error) from error
            if last.get("status") in _FINAL:
                return last
            # Where it is now: events may have ended because the server did.
            try:
                now = self._patiently(lambda check: self._client.ask("GET", path))
            except RefusedError as error:
                raise self._forgotten(error) from error
            if now.get("status") in _FINAL:
                return now

    def _forgotten(self, error: RefusedError) -> ComfyTpuError:
        if error.status != 404:
            return error
        return FailedError(
            f"server={self._client.address} no longer knows this job: it was started again with another --directory, "
            "or the job was removed there; queue the prompt again"
        )

    def _events(self, path: str) -> Iterator[tuple[dict[str, Any], bool]]:
        """The events of a job, and whether each is the newest. Read by a thread: cancelling does not wait for one."""
        happened: queue.Queue[dict[str, Any] | BaseException | None] = queue.Queue()

        def read() -> None:
            try:
                for event in self._client.events(f"{path}/events"):
                    happened.put(event)
                happened.put(None)
            except BaseException as error:  # noqa: BLE001 - the other thread raises it
                happened.put(error)

        threading.Thread(target=read, name="comfy-tpu events", daemon=True).start()
        while True:
            self._callbacks.check()
            try:
                event = happened.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, BaseException):
                raise event
            if event is None:
                return
            yield event, happened.empty()

    def _report(self, path: str, event: Mapping[str, Any], is_newest: bool) -> None:
        progress = read_progress(event.get("progress"))
        if progress is None:
            return
        self._last = progress
        counted = f"step {progress.done}/{progress.total}" if progress.stage == "denoising" else progress.stage
        self._position = f"at {counted}"
        read = self._callbacks.read_preview
        if read is not None and is_newest and progress.stage == "denoising" and progress.done:
            with contextlib.suppress(ComfyTpuError):  # one preview less
                address = f"{path}/preview"
                latents = read(self._in_thread(lambda check: self._client.download(address, _PREVIEW_BYTES_MAX, check)))
                progress = dataclasses.replace(progress, preview=lambda row=0: latents[row : row + 1])
        self._callbacks.on_progress(progress)

    def _report_end(self, end: Progress | None) -> None:
        """Reports the end of the stage, unless an event has: a short stage is over before its last event is sent."""
        last = self._last
        if last is not None and end is not None and last.stage == end.stage:
            end = dataclasses.replace(last, done=last.total, preview=None)
        if end is not None and (last is None or (last.stage, last.done) != (end.stage, end.done)):
            self._callbacks.on_progress(end)

    def _patiently(
        self, action: Callable[[Check], _Result], undo: Callable[[_Result], object] = lambda result: None
    ) -> _Result:
        """Repeats an action until the server answers, for a while. `undo`: as in `_in_thread`."""
        began = time.monotonic()
        while True:
            try:
                return self._in_thread(action, undo)
            except UnreachableError as error:
                waited = time.monotonic() - began
                if waited >= self._wait_seconds:
                    raise LostError(self._loss(error)) from error
                self._callbacks.on_waiting(waited)
            pause = time.monotonic() + _RETRY_SECONDS
            while time.monotonic() < pause:
                self._callbacks.check()
                time.sleep(_POLL_SECONDS)

    def _in_thread(
        self, action: Callable[[Check], _Result], undo: Callable[[_Result], object] = lambda result: None
    ) -> _Result:
        """Carries out an action that may block, such as a request to a server that hangs, so that cancelling does not
        wait for it. `undo` is then called with a result that comes nevertheless."""
        is_unwanted, done = threading.Event(), queue.Queue[tuple[Any, BaseException | None]]()

        def check() -> None:
            if is_unwanted.is_set():
                raise _UnwantedError

        def carry_out() -> None:
            try:
                result = action(check)
            except BaseException as error:  # noqa: BLE001 - the other thread raises it
                done.put((None, error))
                return
            done.put((result, None))
            if is_unwanted.is_set():
                with contextlib.suppress(ComfyTpuError):
                    undo(result)

        threading.Thread(target=carry_out, name="comfy-tpu request", daemon=True).start()
        try:
            while True:
                self._callbacks.check()
                with contextlib.suppress(queue.Empty):
                    result, error = done.get(timeout=_POLL_SECONDS)
                    break
        except BaseException:
            is_unwanted.set()
            with contextlib.suppress(queue.Empty):  # it came in this moment
                result, error = done.get_nowait()
                if error is None:
                    undo(result)
            raise
        if error is not None:
            raise error
        return cast("_Result", result)

    def _loss(self, error: UnreachableError) -> str:
        reason = str(error).removeprefix(f"server={self._client.address} ")
        where = f" {self._position}" if self._position else ""
        return (
            f"server={self._client.address} {reason}{where}, and was not back within {self._wait_seconds:g} s; start "
            "it again with `comfy-tpu serve`, or mend the address on TPU Server, and queue the prompt again"
        )

    def _end(self, id_: str, *, is_lost: bool) -> None:
        """Cancels the job, now or when the server answers again."""
        if not is_lost:
            # Not for long: a server that hangs must not hold whoever cancels.
            cancelling = threading.Thread(target=self._cancel, args=(id_,), name="comfy-tpu cancel", daemon=True)
            cancelling.start()
            cancelling.join(_CANCEL_SECONDS)
            return
        _ABANDONED.setdefault(str(self._client.address), set()).add(id_)

    def _cancel(self, id_: str) -> None:
        try:
            self._client.ask("POST", f"{STAGES_PATH}/{id_}/cancel")
        except RefusedError:  # it is over, or forgotten
            pass
        except ComfyTpuError:
            _ABANDONED.setdefault(str(self._client.address), set()).add(id_)

    def _cancel_abandoned(self) -> None:
        for id_ in _ABANDONED.pop(str(self._client.address), set()):
            self._cancel(id_)


class _UnwantedError(Exception):
    """Ends a transfer that nobody waits for any more."""


_ABANDONED: dict[str, set[str]] = {}
"""Jobs of servers that did not answer when they were given up, by address: a server that comes back would go on."""


def read_progress(given: Any) -> Progress | None:
    """The progress of an event; None where there is none, or one that is not understood."""
    if not isinstance(given, dict):
        return None
    kinds = {"str": str, "Stage": str, "int": int, "bool": bool}
    values: dict[str, Any] = {
        name: given[name]
        for name, kind in _PROGRESS_FIELDS.items()
        if name in given and isinstance(given[name], kinds[str(kind)])
    }
    known = ("loading", "compiling", "encoding", "denoising", "decoding")
    is_known = values.get("stage") in known and {"what", "done", "total"} <= set(values)
    return Progress(**values) if is_known else None


def _failure(client: ServerClient, final: Mapping[str, Any]) -> str:
    error = final.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    if final.get("status") == "cancelled":
        return f"server={client.address} cancelled the job ({message or 'no reason given'}); queue the prompt again"
    return f"server={client.address} failed: {message or 'it does not say why; look at its log'}"
