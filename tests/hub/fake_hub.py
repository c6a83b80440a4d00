"""A hub on this machine: the answers of the Hugging Face hub that a download needs, and its failures."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

COMMIT = "a" * 40
LARGE = 1000
"""Bytes from which a file has a SHA-256, as those in Git LFS have."""


class FakeHub:
    """Serves one repository, `owner/model`, from memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.claimed_sizes: dict[str, int] = {}
        """Sizes that the listing claims, in place of the true ones."""
        self.closes_after: dict[str, list[int]] = {}
        """By file, numbers of bytes after which one answer each ends early."""
        self.ignores_ranges = False
        self.refusal: tuple[int, str] | None = None
        """Status and error code of every answer."""
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and range of each."""
        self.stalls_after: dict[str, int] = {}
        """By file, the number of bytes after which an answer waits for `on_resume`."""
        self.on_stall = threading.Event()
        self.on_resume = threading.Event()
        self.address = ""

    @property
    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            size = self.claimed_sizes.get(name, len(content))
            entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": "b" * 40}
            if len(content) >= LARGE:
                entry["lfs"] = {"size": size, "sha256": sha256(content), "pointerSize": 134}
            siblings.append(entry)
        return {"id": "owner/model", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}

    def bodies(self, name: str) -> list[str]:
        """The ranges of the requests for a file's content."""
        return [range_ for method, path, range_ in self.requests if method == "GET" and path.endswith(f"/{name}")]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range", "")))
            if hub.refusal is not None:
                self._refuse(*hub.refusal)
            elif path.startswith("/api/models/"):
                self._list(path)
            elif match := re.fullmatch(r"/owner/model/resolve/([^/]+)/(.+)", path):
                self._file(match[2], with_body)
            else:
                self._refuse(404, "RepoNotFound")

        def _list(self, path: str) -> None:
            match = re.fullmatch(r"/api/models/owner/model(?:/revision/(.+))?", path)
            if match is None:
                self._refuse(404, "RepoNotFound")
            elif match[1] not in (None, "main", COMMIT):
                self._refuse(404, "RevisionNotFound")
            else:
                self._send(200, json.dumps(hub.listing).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str, with_body: bool) -> None:
            content = hub.files.get(name)
            if content is None:
                self._refuse(404, "EntryNotFound")
                return
            start = 0
            if (range_ := self.headers.get("Range")) and not hub.ignores_ranges:
                start = int(re.fullmatch(r"bytes=(\d+)-", range_)[1])  # type: ignore[index]
            etag = sha256(content) if len(content) >= LARGE else hashlib.sha1(content).hexdigest()
            headers = {
                "ETag": f'"{etag}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
            }
            if len(content) >= LARGE:
                headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            limits = hub.closes_after.get(name, [])
            most = limits.pop(0) if with_body and limits else None
            stall = hub.stalls_after.get(name)
            self._send(206 if start else 200, content[start:], headers, with_body=with_body, most=most, stall=stall)

        def _refuse(self, status: int, code: str) -> None:
            headers = {"X-Error-Code": code, "X-Error-Message": "refused"}
            self._send(status, b"{}", headers, with_body=self.command == "GET")

        def _send(
            self,
            status: int,
            content: bytes,
            headers: dict[str, str],
            *,
            with_body: bool = True,
            most: int | None = None,
            stall: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body and stall is not None:
                self.wfile.write(content[:stall])
                hub.on_stall.set()
                hub.on_resume.wait()
                content = content[stall:]
            if with_body:
                with contextlib.suppress(ConnectionError):  # a client that was stopped
                    self.wfile.write(content[:most])
            if most is not None:
                self.close_connection = True

        def log_message(self, *given: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
