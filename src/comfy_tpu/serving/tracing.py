"""OpenTelemetry, where it is installed and configured: a span for each request, and for each job with its stages."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_CONFIGURED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_STAGES = ("encoding", "denoising", "decoding")
_NANOSECONDS = 1_000_000_000


def start_tracer(environment: Mapping[str, str] = os.environ) -> Any | None:
    """The tracer of OpenTelemetry; None where it is not installed, or no variable of its own says where spans go.

    A provider that is there already, such as that of `opentelemetry-instrument`, is used.
    """
    if not any(environment.get(name) for name in _CONFIGURED):
        return None
    if importlib.util.find_spec("opentelemetry") is None:
        return None
    from opentelemetry import trace

    if not hasattr(trace.get_tracer_provider(), "add_span_processor"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "comfy-tpu"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer("comfy_tpu.serving")


class RequestSpans:
    """A span for each request, below that of the caller where its headers name one."""

    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from opentelemetry import propagate

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        with self._tracer.start_as_current_span(
            f"{scope['method']} request", context=propagate.extract(headers), attributes=attributes
        ):
            await self._app(scope, receive, send)


def record_job(tracer: Any, id_: str, state: str, seconds: Mapping[str, float]) -> None:
    """Writes the spans of a job that has just ended: the whole of it, and its stages one after the other."""
    end = time.time_ns()
    begin = end - int(seconds.get("total", 0.0) * _NANOSECONDS)
    span = tracer.start_span("job", start_time=begin, attributes={"job.id": id_, "job.state": state})
    from opentelemetry import trace

    inside = trace.set_span_in_context(span)
    for stage in _STAGES:
        if stage in seconds:
            stop = begin + int(seconds[stage] * _NANOSECONDS)
            tracer.start_span(stage, context=inside, start_time=begin).end(end_time=stop)
            begin = stop
    span.end(end_time=end)
