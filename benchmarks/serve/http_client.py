"""A small HTTP/1.1 client over asyncio: a larger one would take the cores of the server that it measures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

KEPT_SECONDS = 5.0
"""A connection that was idle for longer is not used again, as with httpx and OpenAI's client."""


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """By their names in small letters."""
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


class HttpClient:
    """One connection, which is opened again where the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._used_at = 0.0

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """`body`: to be sent as JSON. Raises OSError where there is no server."""
        content = b"" if body is None else json.dumps(body).encode()
        fields = {"Host": f"127.0.0.1:{self._port}", "Content-Length": str(len(content)), **(headers or {})}
        if content:
            fields["Content-Type"] = "application/json"
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        sent = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content
        if time.monotonic() - self._used_at > KEPT_SECONDS:
            self.close()
        is_kept = self._writer is not None
        try:
            return await self._exchange(sent)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            # A server closes a connection that was idle: a request on it was not read. Orders are not sent twice.
            if is_kept and method == "GET":
                return await self.request(method, path, body, headers)
            raise ConnectionError(str(error)) from error

    async def _exchange(self, sent: bytes) -> Answer:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(sent)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            content = await self._read_chunks(self._reader)
        else:
            content = await self._reader.readexactly(int(headers.get("content-length", "0")))
        self._used_at = time.monotonic()
        if headers.get("connection") == "close":
            self.close()
        return Answer(int(first.split(" ")[1]), headers, content)

    @staticmethod
    async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return b"".join(parts)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
