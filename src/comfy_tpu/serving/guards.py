"""Who may call, and how much may be sent how slowly."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import hmac
import ipaddress
import json
from collections.abc import Collection, Mapping
from types import MappingProxyType

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfy_tpu.serving.error_answers import describe_error


def find_client(authorization: str, keys: Mapping[str, str]) -> str | None:
    """The name of the client with this key; "" where there are no keys, None for a stranger. Every key is compared, in
    the same time whether or not it is right, and however long it is."""
    if not keys:
        return ""
    scheme, _, given = authorization.partition(" ")
    found = None
    for name, key in keys.items():
        if hmac.compare_digest(_digest(given.strip()), _digest(key)) and scheme.lower() == "bearer":
            found = name
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def is_foreign(headers: Headers) -> bool:
    """Whether a browser sends a request for a page of another site, or by a name that is not this machine's: without
    keys, any page that somebody here looks at could otherwise order jobs (CSRF, DNS rebinding)."""
    host = _host_name(headers.get("host", ""))
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return True
    if "origin" in headers and _host_name(headers["origin"].partition("://")[2]) != host:
        return True
    return not is_loopback(host)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(text: str) -> str:
    """Without the port."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].lower()


class Authentication:
    """Refuses strangers (401), pages of other sites where there are no keys (403), and a client with a key that has as
    many requests open as one may (429); the others' name is `request.state.client`."""

    def __init__(
        self, app: ASGIApp, keys: Mapping[str, str], open_paths: Collection[str], client_requests: int
    ) -> None:
        """`open_paths`: for those without a key, too. `client_requests`: the most at once of one client."""
        self._app, self._keys, self._open_paths = app, keys, open_paths
        self._most, self._open_requests = client_requests, collections.Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.getlist("authorization")
        client = find_client(given[0] if len(given) == 1 else "", self._keys)
        if not self._keys and is_foreign(headers):
            message = "without keys a server answers programs and pages of its own machine only"
            await _refuse(send, 403, message, code="origin")
        elif client is None and scope["path"] not in self._open_paths:
            message = "the key is missing or unknown; send Authorization: Bearer KEY"
            await _refuse(send, 401, message, code="invalid_api_key")
        elif client and self._open_requests[client] >= self._most:
            message = f"{self._most} requests of this client are open already; end some of them, or wait"
            await _refuse(send, 429, message, code="too_many_requests", retry_seconds=1)
        else:
            scope.setdefault("state", {})["client"] = client or ""
            self._open_requests[client or ""] += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._open_requests[client or ""] -= 1


class BodyGuard:
    """Refuses bodies that are too large (413) or too slow (408)."""

    def __init__(
        self,
        app: ASGIApp,
        most_bytes: int,
        seconds: float,
        exceptions: Mapping[str, tuple[int, float]] = MappingProxyType({}),
    ) -> None:
        """`exceptions`: other bytes and seconds, by the beginning of a path."""
        self._app, self._default, self._exceptions = app, (most_bytes, seconds), exceptions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits = (found for path, found in self._exceptions.items() if scope["path"].startswith(path))
        most, seconds = next(limits, self._default)
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            await _refuse(send, 413, f"the body has {int(length)} bytes, and {most} are the most")
            return
        received, is_complete, is_answered = 0, False, False
        deadline = asyncio.get_running_loop().time() + seconds

        async def guarded() -> Message:
            nonlocal received, is_complete
            if is_complete:  # what follows says that the client is gone, and may take its time
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _RefusedError(408, "the body did not arrive in time") from None
            received += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if received > most:
                raise _RefusedError(413, f"the body has more than {most} bytes")
            return message

        async def watched(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        try:
            await self._app(scope, guarded, watched)
        except _RefusedError as refusal:
            if not is_answered:
                await _refuse(send, refusal.status, str(refusal))


class _RefusedError(BaseException):
    """Not an Exception: no handler between shall take it for one of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _refuse(
    send: Send, status: int, message: str, *, code: str | None = None, retry_seconds: int | None = None
) -> None:
    content = json.dumps(describe_error(message, "invalid_request_error", code=code)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),  # what is left of the body is not read
    ]
    if retry_seconds is not None:
        headers.append((b"retry-after", str(retry_seconds).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
