"""Single stages, for clients that have the others: `encode`, `denoise`, `decode`, from safetensors to safetensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from fastapi.responses import FileResponse, StreamingResponse

import comfy_tpu
from comfy_tpu.config import LoraNoise
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.presets import find_preset
from comfy_tpu.families.settings import check_prompt, check_settings, guidance_scales
from comfy_tpu.jobs import request as jobs_request
from comfy_tpu.jobs.ledger import NewJob
from comfy_tpu.jobs.served_ledger import OVER, Order, Record
from comfy_tpu.serving import schema
from comfy_tpu.serving.answers import STATUS, describe_failure
from comfy_tpu.serving.config import Limits
from comfy_tpu.serving.downloads import Download
from comfy_tpu.serving.error_answers import make_error
from comfy_tpu.serving.event_streams import stream_events
from comfy_tpu.serving.input_room import read_length
from comfy_tpu.serving.orders import LORAS_MAX, find_lora
from comfy_tpu.serving.served_model import ServedModel
from comfy_tpu.serving.service import NotFoundError, Service
from comfy_tpu.serving.shapes import media_shape

if TYPE_CHECKING:
    from comfy_tpu.pipeline.model_files import ModelFiles
    from comfy_tpu.pipeline.stage_messages import StageMessage

PATH = "/v1/stages"
_POLL_SECONDS = 0.1
_ALIVE_SECONDS = 2.0
"""How often a stream of events says that the server is there, where it has no news."""
_TYPE = "application/x-safetensors"
_FIELDS = frozenset(
    (
        *("format", "settings", "model", "model_fingerprint", "prompt", "cut", "ranges", "lora", "preview", "preset"),
        *("media", "strength", "control_strength"),
        *("artifact", "seed", "dtype", "comfy_tpu", "pictures"),  # of the files of `comfy-tpu encode`
    )
)


def add_routes(app: FastAPI, service: Service) -> None:
    def find(id_: str, request: Request) -> Record:
        record = service.find(id_, request.state.client)
        if record is None or record.kind != "stage":
            raise NotFoundError(f"there is no stage {id_[:60]!r}")
        return record

    def describe(record: Record) -> dict[str, Any]:
        return describe_stage(record, service)

    @app.get(f"{PATH}/models")
    async def models() -> dict[str, Any]:
        described = [await run_in_threadpool(describe_model, each) for each in service.models.values()]
        return {"object": "list", "comfy_tpu": comfy_tpu.__version__, "data": described}

    @app.post(f"{PATH}/{{stage}}", openapi_extra=schema.stage_body(), responses=schema.answer(schema.STAGE))
    async def create(stage: str, request: Request) -> dict[str, Any]:
        check_stage(stage)
        id_ = await run_in_threadpool(service.ledger.new_id, "stage")
        key = request.headers.get("idempotency-key") or None
        if key is not None and len(key) > 255:
            raise InvalidValueError("the idempotency key has more than 255 characters; choose a shorter one")
        path, client = service.inputs / f"{id_}-input", request.state.client
        size = read_length(request.headers, service.config.limits.stage_bytes)
        try:
            async with contextmanager_in_threadpool(service.receiving(client, key, size)):
                digest = await _receive(request, path)
                order = Order(client, "stage", key, f"{stage} {digest}", input_bytes=path.stat().st_size)
                async with request.app.state.ordering:
                    accepted = await run_in_threadpool(accept, service, id_, stage, order)
        except BaseException:
            service.remove_inputs(id_)
            raise
        if accepted != id_:
            service.remove_inputs(id_)
        return await run_in_threadpool(lambda: describe(find(accepted, request)))

    @app.get(f"{PATH}/{{id_}}", responses=schema.answer(schema.STAGE))
    def retrieve(id_: str, request: Request) -> dict[str, Any]:
        return describe(find(id_, request))

    @app.delete(f"{PATH}/{{id_}}", responses=schema.answer(schema.DELETED))
    def delete(id_: str, request: Request) -> dict[str, Any]:
        service.remove(find(id_, request))
        return {"id": id_, "object": "stage.deleted", "deleted": True}

    @app.post(f"{PATH}/{{id_}}/cancel", responses=schema.answer(schema.STAGE))
    def cancel(id_: str, request: Request) -> dict[str, Any]:
        service.cancel(find(id_, request).id)
        return describe(find(id_, request))

    @app.get(f"{PATH}/{{id_}}/content", response_class=FileResponse, responses=schema.file(_TYPE))
    def content(id_: str, request: Request) -> Response:
        record = find(id_, request)
        path = service.output_path(record, 0)
        if path is None:
            return make_error(409, f"stage {id_} has no result: it is {STATUS[record.state]}", code="not_completed")
        return Download(path, media_type=_TYPE)

    @app.get(f"{PATH}/{{id_}}/preview", response_class=Response, responses=schema.file(_TYPE))
    def preview(id_: str, request: Request) -> Response:
        try:
            latest = (service.inputs / f"{find(id_, request).id}-preview").read_bytes()
        except FileNotFoundError:
            raise NotFoundError(f"there is no preview of stage {id_[:60]!r}") from None
        return Response(latest, media_type=_TYPE)

    @app.get(f"{PATH}/{{id_}}/events", response_class=StreamingResponse, responses=schema.events())
    def events(id_: str, request: Request) -> Response:
        last = ""

        def look() -> tuple[str | None, bool]:
            nonlocal last
            record = find(id_, request)
            before, last = last, json.dumps(describe(record))
            return last if last != before else None, record.state in OVER

        find(id_, request)
        return stream_events(
            request,
            "stage",
            look,
            poll_seconds=_POLL_SECONDS,
            is_stopping=service.is_stopping,
            alive_seconds=_ALIVE_SECONDS,
        )


async def _receive(request: Request, path: Path) -> str:
    """Writes a body to a file; its digest."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        async for chunk in request.stream():
            digest.update(chunk)
            await run_in_threadpool(file.write, chunk)
    return digest.hexdigest()


def check_stage(stage: str) -> None:
    from comfy_tpu.jobs.stages import STAGES

    if stage not in STAGES:
        raise NotFoundError(f"there is no stage {stage[:60]!r}; choose from {', '.join(STAGES)}")


def accept(service: Service, id_: str, stage: str, order: Order) -> str:
    """The id of the job of a stage, whose input is in `service.inputs`. Raises InvalidValueError for an input that the
    model cannot read; QueueFullError or KeyUsedError."""
    from comfy_tpu.pipeline.stage_messages import read_media, read_message

    path = service.inputs / f"{id_}-input"
    message = read_message(path)
    if unknown := sorted(set(message.metadata) - _FIELDS):
        raise InvalidValueError(f"{unknown[0][:60]} is no field of this API; leave it out", field=unknown[0][:60])
    if not message.metadata.get("model"):
        raise InvalidValueError("model is missing; name one", field="model")
    model = service.find_model(message.metadata["model"])
    _check_message(stage, message, model, service.config.limits)
    media: tuple[Hashable, ...] = tuple(
        (name, *tensor.shape) for name, tensor in sorted(message.tensors.items()) if tensor.ndim == 5
    )
    if stage == "encode":
        media = media_shape(model, read_media(message))
    service.check_shapes(order.client, model.name, [message.settings()], media, stage)
    values: dict[str, Any] = {
        **service.config.common,
        "model": model.name,
        "prompt": "",
        "stage": stage,
        "input": str(path),
    }
    if loras := _read_loras(message, service):
        values["lora"] = loras
    if preset := message.metadata.get("preset"):
        find_preset(_files(model).presets, preset, model.name, takes_auto=False)
        values["preset"] = preset
    if message.metadata.get("preview") == "true":
        values["preview"] = str(service.inputs / f"{id_}-preview")
    job = NewJob(id_, 0, jobs_request.Request(values), f"{id_}.safetensors")
    return service.submit(job, order)


def _check_message(stage: str, message: StageMessage, model: ServedModel, limits: Limits) -> None:
    """Whatever can be known without weights: a job that cannot succeed is refused at once."""
    from comfy_tpu.pipeline.checks import check_embeddings, check_latents
    from comfy_tpu.pipeline.media_fitting import check_given
    from comfy_tpu.pipeline.stage_messages import read_embeddings, read_media
    from comfy_tpu.pipeline.step import latent_shape

    files = _files(model)
    meant = message.metadata.get("model_fingerprint", "")
    if meant != files.fingerprint:
        raise InvalidValueError(
            f"model={model.name} is another one here ({files.fingerprint}) than the client means ({meant[:40]}): its "
            "files have changed; queue the prompt again",
            field="model",
        )
    settings = message.settings()
    check_settings(settings, model.card.limits)
    tensors = message.tensors
    if stage == "encode":
        given = read_media(message)
        encodes_media = given or message.metadata.get("media") == "true"
        if not encodes_media and "prompt" not in message.metadata:
            raise InvalidValueError("there is neither a prompt nor an image to encode; give one", field="prompt")
        sizes = [
            *(image.size for image in (*given.images, *given.references)),
            *(v.size for v in given.videos.values()),
        ]
        if any(width * height > limits.image_pixels for width, height in sizes):
            raise InvalidValueError(
                f"an image has more than {limits.image_pixels} pixels; send a smaller one", field="image"
            )
        if "prompt" in message.metadata:
            check_prompt(message.metadata["prompt"])
        if encodes_media:
            check_given(model.card, given, settings, model.name)
    elif stage == "denoise":
        embeddings = read_embeddings(message)
        check_embeddings(files, embeddings, int(model.card.is_guided(max(guidance_scales(settings)))), settings)
    else:
        if set(tensors) != {"latents"}:
            raise InvalidValueError("latents are expected, and nothing else", field="latents")
        if stage == "decode_sound" and model.card.sound is None:
            raise InvalidValueError(f"model={model.name} makes no sound; leave the stage out", field="model")
        check_latents(tensors["latents"], latent_shape(files.family, files.latent_channels, settings), settings)


def _read_loras(message: StageMessage, service: Service) -> list[str]:
    """The LoRAs by name, as a request has them. Raises InvalidValueError where a file here is another one."""
    given = message.json("lora") or []
    if not isinstance(given, list) or len(given) > LORAS_MAX or not all(isinstance(each, dict) for each in given):
        raise InvalidValueError("lora is no list of objects with name, strength, noise and sha256", field="lora")
    loras = []
    for each in given:
        name, strength, noise = (each.get(field) for field in ("name", "strength", "noise"))
        if set(each) != {"name", "strength", "noise", "sha256"} or noise not in get_args(LoraNoise):
            raise InvalidValueError("lora is no list of objects with name, strength, noise and sha256", field="lora")
        path = find_lora(str(name), service.config)
        found = path.stat()
        if _hash(path, found.st_size, found.st_mtime_ns) != each["sha256"]:
            raise InvalidValueError(
                f"lora={path.name} is another file here than at the client; copy the client's to the server's "
                "--lora-directory",
                field="lora",
            )
        if not isinstance(strength, (int, float)) or isinstance(strength, bool):
            raise InvalidValueError(f"lora={path.name} has no number as its strength", field="lora")
        loras.append(f"{path}:{float(strength)!r}:{noise}")
    return loras


@functools.lru_cache(maxsize=256)
def _hash(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_stage(record: Record, service: Service) -> dict[str, Any]:
    progress, values = service.progress(record), record.request.values
    answer: dict[str, Any] = {
        "id": record.id,
        "object": "stage",
        "stage": values["stage"],
        "model": record.request.model,
        "status": "cancelled" if record.state == "cancelled" else STATUS[record.state],
        "created_at": int(record.created_at),
        "progress": None,
        "error": describe_failure(record, service.hide_paths),
    }
    if record.state == "submitted":
        answer["ahead"] = service.ledger.position(record.id)
    if record.state == "running" and progress.report is not None:
        fields = dataclasses.asdict(dataclasses.replace(progress.report, preview=None))
        answer["progress"] = {name: value for name, value in fields.items() if name != "preview"}
    return answer


def describe_model(model: ServedModel) -> dict[str, Any]:
    """What a client needs to know to make the inputs of a stage, and to read the results."""
    files = _files(model)
    colours: Mapping[str, Any] | None = None
    with contextlib.suppress(Exception):  # of previews only; a damaged file of theirs stops nothing
        found = files.preview_colours
        colours = None if found is None else found.as_dict(files.latent_channels)
    return {
        "id": model.name,
        "family": files.family.name,
        "fingerprint": files.fingerprint,
        "defaults": dataclasses.asdict(model.defaults),
        "transformers": len(files.family.denoiser.transformers),
        "latent_channels": files.latent_channels,
        "latent_statistics": [list(map(float, values)) for values in files.latent_statistics],
        "embedding_shapes": {name: list(shape) for name, shape in files.embedding_shapes(model.defaults).items()},
        "preview_colours": colours,
        "presets": {
            name: {"settings": dict(preset.settings), "lora": preset.lora, "is_distilled": preset.is_distilled}
            for name, preset in files.presets.items()
        },
    }


def _files(model: ServedModel) -> ModelFiles:
    assert model.files is not None
    return model.files
