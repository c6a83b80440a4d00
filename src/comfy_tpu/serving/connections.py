"""The HTTP server: how many connections it holds, and how long one may take to say what it wants."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

_STOP_SECONDS = 10
"""How long downloads may go on after the server was told to end. Those who wait for jobs are told at once."""
HEADER_SECONDS = 20.0
"""A request whose headers are not complete by then is answered with 408. uvicorn itself waits for ever, and whoever
opened as many connections as there may be would have the server alone."""
_CONNECTIONS_MAX = 2000
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def make_server(app: ASGIApp, *, header_seconds: float = HEADER_SECONDS) -> uvicorn.Server:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_make_protocol(header_seconds),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=_STOP_SECONDS,
            # Half of the files that a process may open: the other half is for the jobs.
            limit_concurrency=min(_CONNECTIONS_MAX, files // 2),
        )
    )


def _make_protocol(header_seconds: float) -> type[asyncio.Protocol]:
    base: Any = AutoHTTPProtocol

    class TimedProtocol(base):
        """Ends a connection that has begun a request, or none at all, and does not go on with it."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_answering():
                self._stop_watching()
            else:
                self._watch()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_watching()
            super().connection_lost(error)

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _watch(self) -> None:
            if self._timer is None:  # from the first byte on: each further byte would else give it more time
                self._timer = self.loop.call_later(header_seconds, self._end)

        def _stop_watching(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _end(self) -> None:
            self._timer = None
            if not self._is_answering() and not self.transport.is_closing():
                self.transport.write(_TIMED_OUT)
                self.transport.close()

    return TimedProtocol
