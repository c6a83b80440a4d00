"""Errors in the form of OpenAI's API, whoever raises them."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.ledger import LedgerError
from comfy_tpu.jobs.served_ledger import KeyUsedError, QueueFullError
from comfy_tpu.serving.admission import TooLargeError
from comfy_tpu.serving.service import NotFoundError, Service
from comfy_tpu.serving.shapes import NewShapesError

logger = logging.getLogger(__name__)

_UNAVAILABLE_SECONDS = "10"


def describe_error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def make_error(
    status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> JSONResponse:
    return JSONResponse(describe_error(message, kind, param=param, code=code), status)


def make_unavailable(message: str) -> JSONResponse:
    response = make_error(503, message, kind="server_error", code="unavailable")
    response.headers["Retry-After"] = _UNAVAILABLE_SECONDS
    return response


def add_error_handlers(app: FastAPI, service: Service) -> None:
    @app.exception_handler(InvalidValueError)
    async def invalid(_: Request, error: InvalidValueError) -> Response:
        return make_error(400, service.hide_paths(str(error)), param=error.field)

    @app.exception_handler(RequestValidationError)
    async def invalid_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return make_error(400, f"{first['loc'][-1]}: {first['msg']}", param=str(first["loc"][-1]))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:80]
        headers, message, code = dict(error.headers or {}), str(error.detail), None
        if error.status_code == 404:
            message, code = f"there is no {path} here; GET /openapi.json lists what there is", "not_found"
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_list_methods(app, request))
            message = f"{request.method[:20]} is not a method of {path}; use {headers['Allow']}"
        response = make_error(error.status_code, message, code=code)
        response.headers.update(headers)
        return response

    @app.exception_handler(TooLargeError)
    async def too_large(_: Request, error: TooLargeError) -> Response:
        return make_error(400, str(error), param=error.field, code="does_not_fit")

    @app.exception_handler(NotFoundError)
    async def not_found(_: Request, error: NotFoundError) -> Response:
        return make_error(404, str(error), param=error.field, code="not_found")

    @app.exception_handler(QueueFullError)
    async def full(_: Request, error: QueueFullError) -> Response:
        response = make_error(429, str(error), kind="rate_limit_error", code="queue_full")
        response.headers["Retry-After"] = str(service.retry_seconds())
        return response

    @app.exception_handler(NewShapesError)
    async def many_shapes(_: Request, error: NewShapesError) -> Response:
        response = make_error(429, str(error), kind="rate_limit_error", code="too_many_new_shapes")
        response.headers["Retry-After"] = str(error.retry_seconds)
        return response

    @app.exception_handler(KeyUsedError)
    async def used(_: Request, error: KeyUsedError) -> Response:
        return make_error(409, str(error), code="idempotency_key_in_use")

    @app.exception_handler(LedgerError)
    async def no_ledger(_: Request, error: LedgerError) -> Response:  # not its text, which has paths of the server
        logger.error("a request could not be answered: %s", error)
        return make_unavailable(f"the ledger cannot be used: {error.reason}; try again later")

    @app.exception_handler(ComfyTpuError)
    async def failed(_: Request, error: ComfyTpuError) -> Response:
        logger.error("a request could not be answered: %s", error)
        return make_unavailable(service.hide_paths(str(error)))

    @app.exception_handler(OSError)
    async def not_written(_: Request, error: OSError) -> Response:  # not its text, which has paths of the server
        logger.error("a request could not be answered", exc_info=error)
        reason = error.strerror or type(error).__name__
        return make_unavailable(f"the server's disk cannot be used ({reason}); try again later")

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:  # uvicorn logs it
        return make_error(500, "the server made a mistake; its log says which", kind="server_error", code="internal")


def _list_methods(app: FastAPI, request: Request) -> list[str]:
    """Those that the path has, of all its routes."""
    found: set[str] = set()
    for route in app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return sorted(found)
