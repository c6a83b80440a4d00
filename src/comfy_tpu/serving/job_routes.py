"""Videos and images as jobs: ordered, looked at, followed, downloaded, cancelled, deleted; and images as answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse

from comfy_tpu.errors import InvalidValueError
from comfy_tpu.jobs.served_ledger import OVER, Kind, Record
from comfy_tpu.serving import schema
from comfy_tpu.serving.answers import describe_failure, describe_video, preview_url
from comfy_tpu.serving.downloads import Download
from comfy_tpu.serving.error_answers import make_error, make_unavailable
from comfy_tpu.serving.event_streams import has_seen_the_last, nothing_follows, stream_events
from comfy_tpu.serving.image_answers import FIELDS as FORMAT_FIELDS
from comfy_tpu.serving.image_answers import ImageFormat, refuse_format
from comfy_tpu.serving.input_room import read_length
from comfy_tpu.serving.orders import rename_field
from comfy_tpu.serving.service import NotFoundError, Service
from comfy_tpu.serving.uploads import Upload, read_body

_POLL_SECONDS = 0.2
"""How often a request that waits for a job looks at it."""
_ID = re.compile(r"(video|image)_[0-9a-f]{24}")
_VARIANTS = (None, "", "video")


def add_job_routes(app: FastAPI, service: Service, kind: Kind) -> None:
    """Routes that look into the ledger are plain functions, which FastAPI runs in threads: SQLite blocks."""
    jobs, media_type = f"/v1/{kind}s", "video/mp4" if kind == "video" else "image/png"

    def describe(record: Record) -> dict[str, Any]:
        model = service.models.get(record.request.model)
        kept = service.config.retention.seconds
        answer = describe_video(record, model, service.progress(record), kept, service.hide_paths)
        return {**answer, "estimated_seconds": record.estimate}

    def describe_with_wait(record: Record) -> dict[str, Any]:
        return {**describe(record), "estimated_wait_seconds": service.wait_seconds(record)}

    def find(id_: str, request: Request) -> Record:
        record = service.find(id_, request.state.client)
        if record is None or record.kind != kind:
            raise NotFoundError(f"there is no {kind} {id_[:60]!r}")
        return record

    @app.post(jobs, openapi_extra=schema.order_body(), responses=schema.answer(schema.JOB_WITH_WAIT))
    async def create(request: Request) -> dict[str, Any]:
        async with _receive(service, request) as (body, uploads):
            refuse_format(body)
            record = await _accept(service, request, kind, body, uploads)
        return await run_in_threadpool(describe_with_wait, record)

    @app.get(jobs, responses=schema.answer(schema.JOB_LIST))
    def list_jobs(
        request: Request,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=100),
        order: str = Query("desc", pattern="^(asc|desc)$"),
    ) -> dict[str, Any]:
        if after and not (_ID.fullmatch(after) and after.startswith(kind)):
            raise InvalidValueError(f"after={after[:60]!r} is no id of a {kind}; give the last one's", field="after")
        records = service.ledger.list_jobs(
            request.state.client or None, kind, limit=limit + 1, after=after or None, newest_first=order == "desc"
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
    def retrieve(id_: str, request: Request) -> dict[str, Any]:
        return describe_with_wait(find(id_, request))

    @app.delete(jobs + "/{id_}", responses=schema.answer(schema.DELETED))
    def delete(id_: str, request: Request) -> dict[str, Any]:
        service.remove(find(id_, request))
        return {"id": id_, "object": f"{kind}.deleted", "deleted": True}

    @app.post(jobs + "/{id_}/cancel", responses=schema.answer(schema.JOB))
    def cancel(id_: str, request: Request) -> dict[str, Any]:
        service.cancel(find(id_, request).id)
        return describe(find(id_, request))

    @app.get(jobs + "/{id_}/content", response_class=FileResponse, responses=schema.file(media_type))
    def content(id_: str, request: Request, index: int = 0, variant: str | None = None) -> Response:
        record = find(id_, request)
        if kind == "video" and variant not in _VARIANTS:
            raise InvalidValueError(f"variant={variant[:40]!r} is not made here; leave it out", field="variant")
        if record.state != "done":
            return make_error(
                409, f"{kind} {id_} has no file: it is {describe(record)['status']}", code="not_completed"
            )
        if not 0 <= index < len(record.outputs):
            raise InvalidValueError(f"index={index} is not from 0 to {len(record.outputs) - 1}", field="index")
        path = service.output_path(record, index)
        if path is None:
            raise NotFoundError(f"the file of {kind} {id_} is gone")
        return Download(path, media_type=media_type, filename=path.name)

    @app.get(jobs + "/{id_}/events", response_class=StreamingResponse, responses=schema.events())
    def events(id_: str, request: Request) -> Response:
        last, preview = dict[str, Any](), b""

        def look() -> tuple[str | None, bool]:
            nonlocal last, preview
            record = find(id_, request)
            answer, latest = describe(record), service.progress(record).preview
            shown = {**answer, "preview": preview_url(latest)} if latest and latest != preview else answer
            is_new = shown != last
            last, preview = answer, latest
            return json.dumps(shown) if is_new else None, record.state in OVER

        if find(id_, request).state in OVER and has_seen_the_last(request):
            return nothing_follows()
        return stream_events(
            request,
            kind,
            look,
            poll_seconds=_POLL_SECONDS,
            is_stopping=service.is_stopping,
            during=service.previews.watching(id_),
        )


def add_image_routes(app: FastAPI, service: Service) -> None:
    described: dict[str, Any] = {
        "openapi_extra": schema.order_body(is_answered=True),
        "responses": {**schema.answer(schema.IMAGES), **schema.FAILED_JOB},
    }

    @app.post("/v1/images/generations", **described)
    async def generate(request: Request) -> Response:
        async with _receive(service, request) as (body, uploads):
            format_, record = ImageFormat.read(body), await _accept(service, request, "image", body, uploads)
        return await answer(request, format_, record)

    @app.post("/v1/images/edits", **described)
    async def edit(request: Request) -> Response:
        async with _receive(service, request) as (body, uploads):
            if not uploads:
                raise InvalidValueError(
                    "image is missing: give the image to change, as a file of a form", field="image"
                )
            format_, record = ImageFormat.read(body), await _accept(service, request, "image", body, uploads)
        return await answer(request, format_, record)

    async def answer(request: Request, format_: ImageFormat, record: Record) -> Response:
        while record.state not in OVER:
            if service.is_stopping():
                return make_unavailable(f"the server ends; when it is started again, GET /v1/images/{record.id}")
            if await request.is_disconnected():
                if not _key(request):  # who has a key may ask again for what it names
                    await run_in_threadpool(service.cancel, record.id)
                return Response(status_code=499)
            await asyncio.sleep(_POLL_SECONDS)
            found = await run_in_threadpool(service.find, record.id, request.state.client)
            if found is None:
                raise NotFoundError("the image was removed while it was made")
            record = found
        if (failure := describe_failure(record, service.hide_paths)) is not None:
            status = 500 if record.state == "failed" else 409
            return make_error(status, failure["message"], kind="server_error", code=failure["code"])
        paths = [service.output_path(record, index) for index in range(len(record.outputs))]
        data = [{"b64_json": await run_in_threadpool(format_.encode, path)} for path in paths if path]
        answered = {"created": int(time.time()), "data": data, "id": record.id, "output_format": format_.name}
        return JSONResponse(answered)


def _key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key") or None
    if key is not None and len(key) > 255:
        raise InvalidValueError("the idempotency key has more than 255 characters; choose a shorter one")
    return key


@contextlib.asynccontextmanager
async def _receive(service: Service, request: Request) -> AsyncIterator[tuple[dict[str, Any], list[Upload]]]:
    """As `read_body`, after a look at the queue and the disk."""
    limits, is_form = service.config.limits, request.headers.get("content-type", "").lower().startswith("multipart/")
    size = read_length(request.headers, limits.video_body_bytes) if is_form else 0  # JSON is written nowhere
    room = service.receiving(request.state.client, _key(request), size)
    async with contextmanager_in_threadpool(room), read_body(request, limits, service.inputs) as received:
        yield received


async def _accept(
    service: Service, request: Request, kind: Kind, body: dict[str, Any], uploads: Sequence[Upload]
) -> Record:
    said, client = {name: value for name, value in body.items() if name not in FORMAT_FIELDS}, request.state.client
    async with request.app.state.ordering:
        try:
            return await run_in_threadpool(service.accept, said, kind, client, _key(request), uploads)
        except InvalidValueError as error:
            raise rename_field(error, body) from error
