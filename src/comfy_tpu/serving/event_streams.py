"""Server-sent events of a job, until it is over, its client has gone, or the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from comfy_tpu.jobs.ledger import LedgerError
from comfy_tpu.serving.service import NotFoundError

ALIVE_SECONDS = 10.0
"""How often a stream without news sends a comment: proxies end a connection that is silent for a minute or less."""
_LAST_ID = "last"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would keep the events until it has some kilobytes
}

Look = Callable[[], tuple[str | None, bool]]
"""The JSON of what is new, None where nothing is; and whether nothing follows."""


def has_seen_the_last(request: Request) -> bool:
    """Whether a browser connects again to a stream that was over: an EventSource does, for ever, until it gets 204."""
    return request.headers.get("last-event-id") == _LAST_ID


def nothing_follows() -> Response:
    return Response(status_code=204)


def stream_events(
    request: Request,
    name: str,
    look: Look,
    *,
    poll_seconds: float,
    is_stopping: Callable[[], bool],
    alive_seconds: float = ALIVE_SECONDS,
    during: contextlib.AbstractContextManager[None] | None = None,
) -> Response:
    """`name`: of the events. `look` is called every `poll_seconds`; NotFoundError ends the stream. `during`: entered
    while it lasts."""

    async def write() -> AsyncIterator[str]:
        with during or contextlib.nullcontext():
            async for part in write_parts():
                yield part

    async def write_parts() -> AsyncIterator[str]:
        sent_at = time.monotonic()
        while not (is_stopping() or await request.is_disconnected()):
            try:
                text, is_over = await run_in_threadpool(look)
            except NotFoundError:  # the job was deleted
                return
            except LedgerError:  # it may be back in a moment; those who order are told
                text, is_over = None, False
            now = time.monotonic()
            if text is not None:
                yield f"event: {name}\n{f'id: {_LAST_ID}' + chr(10) if is_over else ''}data: {text}\n\n"
                sent_at = now
            elif now - sent_at > alive_seconds:
                yield ": alive\n\n"
                sent_at = now
            if is_over:
                return
            await asyncio.sleep(poll_seconds)

    return StreamingResponse(write(), media_type="text/event-stream", headers=_HEADERS)
