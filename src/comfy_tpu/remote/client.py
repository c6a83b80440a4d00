"""Requests to a server of `comfy-tpu serve`. Every one has a time limit; redirects are not followed. Needs no torch."""

from __future__ import annotations

import contextlib
import http.client
import io
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.json_input import parse_json
from comfy_tpu.remote.keys import VARIABLE, Address
from comfy_tpu.terminal_text import excerpt

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
"""Between two pieces of an answer, or of a body."""
TRANSFER_SECONDS = 3600.0
"""For a whole body."""
_JSON_BYTES_MAX = 16 * 2**20
_LINE_BYTES_MAX = 2**20
_CHUNK_BYTES = 2**18
_LATER = (502, 503, 504)
"""What a proxy says of a server that is not there."""

Check = Callable[[], None]
"""Called between two pieces of a transfer. To end it, raise an exception."""


class UnreachableError(ComfyTpuError):
    """The server does not answer; it may later."""


class RefusedError(ComfyTpuError):
    """The server says no."""

    def __init__(self, message: str, status: int, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.status = status


class ServerClient:
    def __init__(
        self,
        address: Address,
        key: str | None = None,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.address = address
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._connect_seconds, self._answer_seconds = connect_seconds, answer_seconds

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        check: Check = lambda: None,
    ) -> dict[str, Any]:
        """The JSON object of an answer. `check` is not called once all of the body is sent: the caller has to know what
        the server did with it."""
        with self._open(method, path, body, headers or {}, check) as answer:
            return self._read_json(self._read(answer, _JSON_BYTES_MAX, lambda: None))

    def download(self, path: str, most_bytes: int, check: Check = lambda: None) -> bytes:
        with self._open("GET", path, None, {}, check) as answer:
            return bytes(self._read(answer, most_bytes, check))

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        """The data of server-sent events, until the server ends them. Blocks between two of them."""
        with self._open("GET", path, None, {"Accept": "text/event-stream"}, lambda: None) as answer:
            while True:
                with self._failures():
                    line = answer.readline(_LINE_BYTES_MAX)
                if not line:
                    return
                if line.startswith(b"data:"):
                    yield self._read_json(line[5:].strip())

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], check: Check
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        try:
            sent = {**self._headers, **headers, "Connection": "close"}
            if body is not None:
                sent["Content-Length"] = str(len(body))
            with self._failures():
                connection.connect()
                connection.sock.settimeout(self._answer_seconds)
                source = None if body is None else _CheckedBody(body, check)
                # A server that refuses a body answers before it has all of it, and ends the connection.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, self.address.path + path, source, sent)
                answer = connection.getresponse()
            with contextlib.closing(answer):  # the connection has handed its socket over
                self._check_status(answer)
                yield answer
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        host, port, seconds = self.address.host, self.address.port, self._connect_seconds
        if self.address.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=seconds)

    def _check_status(self, answer: http.client.HTTPResponse) -> None:
        status = answer.status
        if status == 200:
            return
        if 300 <= status < 400:
            raise RefusedError(
                f"server={self.address} sends to another address ({status}), which is not followed; give the address "
                "that answers itself",
                status,
            )
        with self._failures():
            content = answer.read(65536)
        error: Any = None
        with contextlib.suppress(ValueError):
            said = parse_json(content)
            error = said.get("error") if isinstance(said, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if status in _LATER and not isinstance(message, str):
            raise UnreachableError(f"server={self.address} is not there ({status})")
        if status == 401:
            raise RefusedError(
                f"server={self.address} refuses the key, or wants one; put {self.address}=KEY into {VARIABLE} or the "
                "file of keys",
                status,
            )
        if status == 404 and not isinstance(message, str):
            raise RefusedError(f"server={self.address} is no server of comfy-tpu, or an older one", status)
        reason = excerpt(message) if isinstance(message, str) else f"{status} {answer.reason}"
        raise RefusedError(
            f"server={self.address} refuses: {reason}", status, error.get("param") if isinstance(error, dict) else None
        )

    def _read(self, answer: http.client.HTTPResponse, most_bytes: int, check: Check) -> bytearray:
        expected = answer.length
        if expected is not None and expected > most_bytes:
            raise RefusedError(f"server={self.address} sends {expected} bytes, and {most_bytes} are the most", 200)
        content, deadline = bytearray(), time.monotonic() + TRANSFER_SECONDS
        while True:
            check()
            with self._failures():
                piece = answer.read(_CHUNK_BYTES)
            if not piece:
                break
            content += piece
            if len(content) > most_bytes:
                raise RefusedError(f"server={self.address} sends more than {most_bytes} bytes", 200)
            if time.monotonic() > deadline:
                raise UnreachableError(f"server={self.address} is too slow")
        if expected is not None and len(content) != expected:
            raise UnreachableError(f"server={self.address} was lost: {len(content)} of {expected} bytes came")
        return content

    def _read_json(self, content: bytes | bytearray) -> dict[str, Any]:
        try:
            value = parse_json(bytes(content))
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RefusedError(f"server={self.address} is no server of comfy-tpu: its answer is no JSON", 200)
        return value

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise RefusedError(
                f"server={self.address} has a certificate that is not trusted here ({error.verify_message})", 0
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UnreachableError(f"server={self.address} does not answer ({excerpt(reason)})") from error


class _CheckedBody(io.BytesIO):
    """A body that asks, before each piece, whether it is still wanted."""

    def __init__(self, content: bytes, check: Check) -> None:
        super().__init__(content)
        self._check, self._deadline = check, time.monotonic() + TRANSFER_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() < len(self.getbuffer()):
            self._check()
        if time.monotonic() > self._deadline:
            raise TimeoutError("the body could not be sent in time")
        return super().read(size)
