"""The page at `/`: files of this package, without a key and under a strict content security policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse

_DIRECTORY = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_NAMES = ("page.css", "page.js", "api.js", "jobs.js", "order.js", "texts.js", "texts.json", "icon.svg")
_FILES = {"/": "index.html", **{f"/page/{name}": name for name in _NAMES}}
"""By path. Nothing else is served: no path of a request becomes one of the disk."""

PAGE_PATHS = frozenset(_FILES)

HEADERS = {
    # blob: files that are fetched with a key. data: previews.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asks whether it changed: another version of the server has another page
}


def add_page_routes(app: FastAPI) -> None:
    for path, name in _FILES.items():
        app.get(path, include_in_schema=False)(_make_route(_DIRECTORY / name))


def _make_route(path: Path) -> Callable[[], Awaitable[Response]]:
    async def send_file() -> Response:
        return FileResponse(path, media_type=_MEDIA_TYPES[path.suffix], headers=HEADERS)

    return send_file
