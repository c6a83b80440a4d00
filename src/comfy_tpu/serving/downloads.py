"""Files as answers: whole or in parts, and gone without a fault of the server where they are deleted meanwhile."""

from __future__ import annotations

import re

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from comfy_tpu.serving.error_answers import make_error

_RANGE = re.compile(rb"\s*(\d{0,18})-(\d{0,18})\s*")


class Download(FileResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: list[Message] = []
        is_begun = False

        async def begin_late(message: Message) -> None:
            """Holds the status back until there are bytes: a file that is gone can still be answered with 404."""
            nonlocal is_begun
            if message["type"] == "http.response.start":
                held.append(message)
                return
            start = held.pop() if held else None
            if start is not None and start["status"] == 416:
                await _refuse_range(start, scope, receive, send)
                is_begun = True
                return
            if start is not None:
                is_begun = True
                await send(start)
            await send(message)

        try:
            await super().__call__(_without_wrong_ranges(scope), receive, begin_late)
        except (RuntimeError, FileNotFoundError):
            if is_begun:
                raise
            await make_error(404, "the file was deleted", code="not_found")(scope, receive, send)


def _without_wrong_ranges(scope: Scope) -> Scope:
    """Without a Range of another unit than bytes, or one that is none: RFC 9110 has the whole file sent then."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"range" or _is_range(value)]
    return {**scope, "headers": headers}


def _is_range(value: bytes) -> bool:
    unit, _, parts = value.partition(b"=")
    matches = [_RANGE.fullmatch(part) for part in parts.split(b",") if part.strip()]
    return (
        unit.strip().lower() == b"bytes"
        and bool(matches)
        and all(match and any(match.groups()) and not _is_backwards(*match.groups()) for match in matches)
    )


def _is_backwards(first: bytes, last: bytes) -> bool:
    return bool(first and last) and int(first) > int(last)


async def _refuse_range(start: Message, scope: Scope, receive: Receive, send: Send) -> None:
    given = dict(scope["headers"]).get(b"range", b"").decode("latin-1")[:60]
    whole = next(value for name, value in start["headers"] if name.lower() == b"content-range").decode("latin-1")
    response = make_error(416, f"range={given!r} is behind the end of the file ({whole}); ask for less")
    response.headers["Content-Range"] = whole
    await response(scope, receive, send)
