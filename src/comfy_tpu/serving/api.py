"""The HTTP API: OpenAI's images and videos, progress as events, health, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute

from comfy_tpu.jobs.served_ledger import Kind
from comfy_tpu.serving import schema, stages
from comfy_tpu.serving.answers import describe_model
from comfy_tpu.serving.error_answers import add_error_handlers
from comfy_tpu.serving.guards import Authentication, BodyGuard
from comfy_tpu.serving.job_routes import add_image_routes, add_job_routes
from comfy_tpu.serving.logs import RequestLog
from comfy_tpu.serving.metrics import render_metrics
from comfy_tpu.serving.page_routes import PAGE_PATHS, add_page_routes
from comfy_tpu.serving.service import NotFoundError, Service
from comfy_tpu.serving.shapes import taken_sizes
from comfy_tpu.serving.tracing import RequestSpans

_KINDS: tuple[Kind, ...] = ("video", "image")
_ORDER_THREADS = 4
"""Orders that are looked at at once. The first of a shape waits for its plan: with as many as come, they took every
thread, and downloads waited, too."""
_OPEN_PATHS = frozenset(("/healthz", "/readyz", *PAGE_PATHS))
"""They need no key: whoever watches the machine asks them, and the page asks for the key itself."""


def make_app(service: Service, tracer: Any | None = None) -> FastAPI:
    """`tracer`: of OpenTelemetry."""
    app = FastAPI(title="comfy-tpu", docs_url=None, redoc_url=None, redirect_slashes=False, responses=schema.ERRORS)
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
    app.add_middleware(
        Authentication, keys=service.config.keys, open_paths=_OPEN_PATHS, client_requests=limits.client_requests
    )
    add_error_handlers(app, service)

    _add_machine_routes(app, service)
    for kind in _KINDS:
        add_job_routes(app, service, kind)
    add_image_routes(app, service)
    stages.add_routes(app, service)
    add_page_routes(app)
    _answer_head(app)
    if tracer is not None:
        app.add_middleware(RequestSpans, tracer=tracer)
    app.add_middleware(RequestLog)  # the outermost
    return app


def _add_machine_routes(app: FastAPI, service: Service) -> None:
    limits = service.config.limits

    @app.get("/healthz", responses={"503": {"description": "It ends, and is to be started again"}})
    async def health() -> Response:
        if service.failure:
            return JSONResponse({"status": service.problem}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", responses={"503": {"description": "Not yet, or not now"}})
    async def ready() -> Response:
        if service.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": service.problem or "the first step has not been made"}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await run_in_threadpool(render_metrics, service), media_type="text/plain; version=0.0.4")

    def describe(name: str) -> dict[str, Any]:
        model = service.models[name]
        return describe_model(model, service.started_at, taken_sizes(model, limits.sizes))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(name) for name in service.models]}

    @app.get("/v1/models/{name:path}")  # a hub id has a slash
    async def model(name: str) -> dict[str, Any]:
        if name not in service.models:
            raise NotFoundError(
                f"model={name[:80]!r} is not served here; choose from {', '.join(service.models)}", field="model"
            )
        return describe(name)


def _answer_head(app: FastAPI) -> None:
    """HEAD wherever there is GET, as HTTP has it: those who watch a server or download from it ask with it first. But
    for events, which may not end."""
    for route in [each for each in app.routes if isinstance(each, APIRoute)]:
        if "GET" in (route.methods or ()) and not route.path.endswith("/events"):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
