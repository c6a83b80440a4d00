"""The page at `/`: files of this package, without a key and under a strict content security policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse

_DIRECTORY = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/api.js": ("api.js", "text/javascript; charset=utf-8"),
    "/page/texts.json": ("texts.json", "application/json"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
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
    for path, (name, media_type) in _FILES.items():
        app.get(path, include_in_schema=False)(_make_route(_DIRECTORY / name, media_type))


def _make_route(path: Path, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send_file() -> Response:
        return FileResponse(path, media_type=media_type, headers=HEADERS)

    return send_file
