"""Logs as JSON lines: what happened to which request of which client, and to which job."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import secrets
import sys
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_HEADER = "x-request-id"
_GIVEN_ID = re.compile(r"^[\w.:-]{1,64}$", re.ASCII)
_FIELDS = ("client", "job", "state", "method", "path", "status", "seconds", "model", "prompt")

_POLLED = ("/healthz", "/readyz", "/metrics")

logger = logging.getLogger(__name__)
current_request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")
"""The id of the request that is being answered."""


class JsonFormatter(logging.Formatter):
    """One object a line. Keys beside time, level and message are there where they are known."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if request := current_request.get():
            entry["request"] = request
        entry |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def start_logs() -> None:
    """Sends this package's and the server's logs to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("comfy_tpu", "uvicorn.error"):
        logging.getLogger(name).handlers = [handler]
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).propagate = False
    logging.getLogger("comfy_tpu.compiler").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").disabled = True  # a prompt may be in an address


class RequestLog:
    """Gives each request an id, which is in its answer and in all logs about it, and logs its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_HEADER, "")
        id_ = given if _GIVEN_ID.match(given) else secrets.token_hex(8)
        current_request.set(id_)
        begun, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_HEADER] = id_
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            is_quiet = scope["path"] in _POLLED or (scope["method"] == "GET" and 0 < status < 400)
            level = logging.DEBUG if is_quiet else logging.INFO
            client = scope.get("state", {}).get("client", "")
            facts = {"method": scope["method"], "path": scope["path"], "status": status, "client": client}
            seconds = round(time.perf_counter() - begun, 4)
            logger.log(level, "%s %s: %d", scope["method"], scope["path"], status, extra={**facts, "seconds": seconds})
