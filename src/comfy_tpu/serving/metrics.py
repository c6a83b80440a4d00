"""What Prometheus reads."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from comfy_tpu.serving.activity import STEP_BUCKETS
from comfy_tpu.serving.service import Service


def render_metrics(service: Service) -> str:
    """In Prometheus' text format."""
    activity, counts = service.activity, dataclasses.asdict(service.ledger.counts())
    lines = [
        *_family("jobs", "gauge", "Jobs of the ledger by state.", "state", counts),
        *_family("queue_length", "gauge", "Jobs that wait.", "", {"": counts["submitted"]}),
        *_family("finished_total", "counter", "Jobs that this process finished.", "state", activity.finished),
        *_family("steps_total", "counter", "Denoising steps.", "", {"": activity.steps}),
        *_step_histogram(service),
        *_family("stage_seconds_total", "counter", "Of finished jobs.", "stage", activity.stage_seconds),
        *_family("programs_total", "counter", "Made ready: compiled, or cached.", "origin", activity.programs),
        *_family("idle_share", "gauge", "Of the time, without a job at work.", "", {"": activity.idle_share}),
        *_family("ready", "gauge", "Whether a step was made.", "", {"": int(service.is_ready)}),
        *_device_memory(),
    ]
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP comfy_tpu_{name} {text}"
    yield f"# TYPE comfy_tpu_{name} {kind}"
    for key, value in values.items():
        labels = f'{{{label}="{key}"}}' if label else ""
        yield f"comfy_tpu_{name}{labels} {value if isinstance(value, int) else f'{value:.6f}'}"


def _step_histogram(service: Service) -> Iterator[str]:
    activity, name = service.activity, "comfy_tpu_step_seconds"
    yield f"# HELP {name} Seconds of a denoising step, but for the first of a job."
    yield f"# TYPE {name} histogram"
    *sums, total = itertools.accumulate(activity.step_counts)
    for limit, count in zip(STEP_BUCKETS, sums, strict=True):
        yield f'{name}_bucket{{le="{limit}"}} {count}'
    yield f'{name}_bucket{{le="+Inf"}} {total}'
    yield f"{name}_sum {activity.step_seconds:.6f}"
    yield f"{name}_count {total}"


def _device_memory() -> Iterator[str]:
    """The memory of the devices that hold this process's weights, if they report it. Asking JAX for its devices would
    start them, in this request's thread, and take those of Ray's workers."""
    if (residency := sys.modules.get("comfy_tpu.compiler.residency")) is None:
        return
    devices: Iterable[Any] = residency.shared_residency().bytes_per_device()
    found = {str(device.id): device.memory_stats() or {} for device in devices if device.platform != "cpu"}
    for name, text in (("bytes_in_use", "Memory in use."), ("bytes_limit", "Memory that can be used.")):
        values = {device: facts[name] for device, facts in found.items() if name in facts}
        if values:
            yield from _family(f"device_{name}", "gauge", text, "device", values)
