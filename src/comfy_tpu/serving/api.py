"""The HTTP API: OpenAI's images and videos, progress as events, health, metrics."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.served_ledger import KeyUsedError, Kind, QueueFullError, Record
from comfy_tpu.serving import schema, stages
from comfy_tpu.serving.admission import TooLargeError
from comfy_tpu.serving.answers import NotFoundError, describe_error, describe_model, describe_video, preview_url
from comfy_tpu.serving.guards import Authentication, BodyGuard
from comfy_tpu.serving.logs import RequestLog
from comfy_tpu.serving.metrics import render_metrics
from comfy_tpu.serving.page_routes import PAGE_PATHS, add_page_routes
from comfy_tpu.serving.service import Service
from comfy_tpu.serving.tracing import RequestSpans
from comfy_tpu.serving.uploads import read_body

_KINDS: tuple[Kind, ...] = ("video", "image")
_POLL_SECONDS = 0.2
"""How often a request that waits for a job looks at it."""
_ORDER_THREADS = 4
"""Orders that are looked at at once. The first of a shape waits for its plan: with as many as come, they took every
thread, and downloads waited, too."""
_OVER = ("done", "failed", "cancelled")
_OPEN_PATHS = frozenset(("/healthz", "/readyz", *PAGE_PATHS))
"""They need no key: whoever watches the machine asks them, and the page asks for the key itself."""


def make_app(service: Service, tracer: Any | None = None) -> FastAPI:
    """`tracer`: of OpenTelemetry."""
    app = FastAPI(title="comfy-tpu", docs_url=None, redoc_url=None, responses=schema.ERRORS)
    app.state.ordering = asyncio.Semaphore(_ORDER_THREADS)
    limits = service.config.limits
    large = {stages.PATH: (limits.stage_bytes, limits.stage_seconds)}
    takes_videos = any(model.card.videos for model in service.models.values())
    forms = {"/v1/videos": (limits.video_body_bytes, limits.stage_seconds)} if takes_videos else {}
    app.add_middleware(
        BodyGuard,
        most_bytes=limits.body_bytes,
        seconds=limits.body_seconds,
        exceptions=large,
        form_exceptions=forms,
    )
    app.add_middleware(Authentication, keys=service.config.keys, open_paths=_OPEN_PATHS)
    _add_errors(app, service)

    _add_machine_routes(app, service)
    for kind in _KINDS:
        _add_job_routes(app, service, kind)
    _add_image_routes(app, service)
    stages.add_routes(app, service)
    add_page_routes(app)
    if tracer is not None:
        app.add_middleware(RequestSpans, tracer=tracer)
    app.add_middleware(RequestLog)  # the outermost
    return app


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(InvalidValueError)
    async def invalid(_: Request, error: InvalidValueError) -> Response:
        return _error(400, str(error), param=error.field)

    @app.exception_handler(RequestValidationError)
    async def invalid_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _error(400, f"{first['loc'][-1]}: {first['msg']}", param=str(first["loc"][-1]))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        response = _error(error.status_code, str(error.detail))
        response.headers.update(error.headers or {})  # Allow, of a method that there is not
        return response

    @app.exception_handler(TooLargeError)
    async def too_large(_: Request, error: TooLargeError) -> Response:
        return _error(400, str(error), param=error.field, code="does_not_fit")

    @app.exception_handler(NotFoundError)
    async def not_found(_: Request, error: NotFoundError) -> Response:
        return _error(404, str(error), code="not_found")

    @app.exception_handler(QueueFullError)
    async def full(_: Request, error: QueueFullError) -> Response:
        response = _error(429, str(error), code="queue_full")
        response.headers["Retry-After"] = str(service.retry_seconds())
        return response

    @app.exception_handler(KeyUsedError)
    async def used(_: Request, error: KeyUsedError) -> Response:
        return _error(409, str(error), code="idempotency_key_in_use")

    @app.exception_handler(ComfyTpuError)
    async def failed(_: Request, error: ComfyTpuError) -> Response:
        return _error(503, str(error), kind="server_error")


def _error(
    status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> JSONResponse:
    return JSONResponse(describe_error(message, kind, param=param, code=code), status)


def _add_machine_routes(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", responses={"503": {"description": "Not yet"}})
    async def ready() -> Response:
        if service.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "the first step has not been made"}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(render_metrics(service), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        listed = [describe_model(model, service.started_at) for model in service.models.values()]
        return {"object": "list", "data": listed}


def _add_job_routes(app: FastAPI, service: Service, kind: Kind) -> None:
    jobs, media_type = f"/v1/{kind}s", "video/mp4" if kind == "video" else "image/png"

    def describe(record: Record) -> dict[str, Any]:
        model = service.models.get(record.request.model)
        answer = describe_video(record, model, service.progress(record), service.config.retention.seconds)
        return {**answer, "estimated_seconds": record.estimate}

    def describe_with_wait(record: Record) -> dict[str, Any]:
        return {**describe(record), "estimated_wait_seconds": service.wait_seconds(record)}

    def find(id_: str, request: Request) -> Record:
        record = service.find(id_, request.state.client)
        if record is None or record.kind != kind:
            raise NotFoundError(f"there is no {kind} {id_[:60]!r}")
        return record

    @app.post(
        jobs, openapi_extra=schema.order_body(is_image=kind == "image"), responses=schema.answer(schema.JOB_WITH_WAIT)
    )
    async def create(request: Request) -> dict[str, Any]:
        return describe_with_wait(await _accept(service, request, kind))

    @app.get(jobs, responses=schema.answer(schema.JOB_LIST))
    async def list_jobs(
        request: Request,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=100),
        order: str = Query("desc", pattern="^(asc|desc)$"),
    ) -> dict[str, Any]:
        records = service.ledger.list_jobs(
            request.state.client or None, kind, limit=limit + 1, after=after, newest_first=order == "desc"
        )
        shown = [describe(record) for record in records[:limit]]
        return {
            "object": "list",
            "data": shown,
            "has_more": len(records) > limit,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
        }

    @app.get(jobs + "/{id_}", responses=schema.answer(schema.JOB_WITH_WAIT))
    async def retrieve(id_: str, request: Request) -> dict[str, Any]:
        return describe_with_wait(find(id_, request))

    @app.delete(jobs + "/{id_}", responses=schema.answer(schema.DELETED))
    async def delete(id_: str, request: Request) -> dict[str, Any]:
        await run_in_threadpool(service.remove, find(id_, request))
        return {"id": id_, "object": f"{kind}.deleted", "deleted": True}

    @app.post(jobs + "/{id_}/cancel", responses=schema.answer(schema.JOB))
    async def cancel(id_: str, request: Request) -> dict[str, Any]:
        await run_in_threadpool(service.cancel, find(id_, request).id)
        return describe(find(id_, request))

    @app.get(jobs + "/{id_}/content", response_class=FileResponse, responses=schema.file(media_type))
    async def content(id_: str, request: Request, index: int = 0) -> Response:
        record = find(id_, request)
        path = service.output_path(record, index)
        if path is None:
            return _error(409, f"{kind} {id_} has no file: it is {describe(record)['status']}", code="not_completed")
        return FileResponse(path, media_type=media_type, filename=path.name)

    @app.get(jobs + "/{id_}/events", response_class=StreamingResponse, responses=schema.events())
    async def events(id_: str, request: Request) -> Response:
        find(id_, request)
        return StreamingResponse(_stream(id_, request), media_type="text/event-stream")

    async def _stream(id_: str, request: Request) -> AsyncIterator[str]:
        last, preview = dict[str, Any](), b""
        with service.previews.watching(id_):
            while not await request.is_disconnected():
                record = service.find(id_, request.state.client)
                if record is None:
                    return
                answer, latest = describe(record), service.progress(record).preview
                if answer != last or latest != preview:
                    shown = {**answer, "preview": preview_url(latest)} if latest != preview else answer
                    yield f"event: {kind}\ndata: {json.dumps(shown)}\n\n"
                    last, preview = answer, latest
                if record.state in _OVER:
                    return
                await asyncio.sleep(_POLL_SECONDS)


def _add_image_routes(app: FastAPI, service: Service) -> None:
    described: dict[str, Any] = {
        "openapi_extra": schema.order_body(is_image=True),
        "responses": {**schema.answer(schema.IMAGES), **schema.FAILED_JOB},
    }

    @app.post("/v1/images/generations", **described)
    @app.post("/v1/images/edits", **described)
    async def generate(request: Request) -> Response:
        record = await _accept(service, request, "image")
        while record.state not in _OVER:
            if await request.is_disconnected():
                await run_in_threadpool(service.cancel, record.id)
                return Response(status_code=499)
            await asyncio.sleep(_POLL_SECONDS)
            found = service.find(record.id, request.state.client)
            if found is None:
                raise NotFoundError("the image was removed while it was made")
            record = found
        if record.state != "done":
            return _error(
                500 if record.state == "failed" else 409, record.error, kind="server_error", code=record.state
            )
        paths = [service.output_path(record, index) for index in range(len(record.outputs))]
        data = [
            {"b64_json": base64.b64encode(await run_in_threadpool(path.read_bytes)).decode()} for path in paths if path
        ]
        return JSONResponse({"created": int(time.time()), "data": data, "id": record.id})


async def _accept(service: Service, request: Request, kind: Kind) -> Record:
    async with read_body(request, service.config.limits, service.inputs) as (body, uploads):
        if kind == "image" and body.get("n") not in (None, ""):
            body = {**body, "num_videos": body["n"]}
        key = request.headers.get("idempotency-key") or None
        if key is not None and len(key) > 255:
            raise InvalidValueError("the idempotency key has more than 255 characters; choose a shorter one")
        async with request.app.state.ordering:
            return await run_in_threadpool(service.accept, body, kind, request.state.client, key, uploads)
