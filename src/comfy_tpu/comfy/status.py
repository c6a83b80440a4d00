"""The status of the devices, from a pipeline's progress: as a line for the node and as data for the panel."""

from __future__ import annotations

import collections
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from comfy_tpu.comfy.fallbacks import Fallbacks
from comfy_tpu.comfy.first_import import import_jax
from comfy_tpu.comfy.node_text import NodeLine, NodeText, clock_time, join_line, part_text, size_text
from comfy_tpu.errors import join_names
from comfy_tpu.pipeline.progress import Progress

_RECENT_STEPS = 8
_IDLE: dict[str, Any] = {
    "stage": "idle",
    "what": "",
    "model": "",
    "part": "",
    "size": "",
    "done": 0,
    "total": 0,
    "node": None,
}


class Status:
    """The current status. Written by the thread that runs nodes, read by the server's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._started = False
        self._activity = _IDLE
        self._steps: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._mark = 0.0
        self._compiling_since = 0.0
        self._compiled: dict[str, Any] = {"programs": 0, "from_cache": 0, "seconds": 0.0, "last": None, "latest": None}
        self.fallbacks = Fallbacks()
        """What ran on the host instead of the devices."""

    def start(self) -> None:
        """Lets `snapshot` ask JAX for devices, which it starts."""
        # First: where it fails, or takes long, a browser that asks meanwhile must not meet that.
        _check_devices()
        _devices()
        with self._lock:
            self._started = True

    def record(self, progress: Progress, node: str | None) -> None:
        with self._lock:
            now = self._clock()
            if progress.stage == "denoising" and progress.done:
                # One that was reused takes no time, and among those that take some would make the median 0.
                if not progress.reused:
                    self._steps.append(now - self._mark)
            elif progress.stage == "denoising":
                self._steps.clear()
            elif progress.stage == "compiling":
                self._record_program(progress, now)
            # Whatever else happens between two steps is not a step's time: a compilation in the first one above all.
            self._mark = now
            compiles = progress.compiles or (progress.done and not progress.from_cache)
            self._activity = {
                "stage": "preparing" if progress.stage == "compiling" and not compiles else progress.stage,
                "what": progress.label,
                "model": progress.model,
                "part": progress.part,
                "size": progress.size,
                "done": progress.done,
                "total": progress.total,
                "node": node,
            }

    def set_idle(self) -> None:
        """Records that no node is running."""
        with self._lock:
            self._activity = _IDLE

    def line(self) -> NodeLine:
        """The current activity as one line."""
        with self._lock:
            return _activity_line(self._activity, self._step_seconds())

    def text(self) -> str:
        """The current activity as one line in English."""
        return join_line(self.line())

    def snapshot(self) -> dict[str, Any]:
        """The status as JSON, described in docs/comfyui.md. Devices are included if JAX was started before."""
        with self._lock:
            step, activity = self._step_seconds(), self._activity
            denoising = activity["stage"] == "denoising" and step is not None
            document: dict[str, Any] = {
                "schema": 1,
                "started": self._started,
                "platform": None,
                "devices": [],
                "resident": [],
                "activity": dict(activity),
                "step_seconds": step,
                "eta_seconds": step * (activity["total"] - activity["done"]) if denoising and step else None,
                "compiled": dict(self._compiled),
                "fallbacks": self.fallbacks.as_list(),
            }
        return document | _devices() if document["started"] else document

    def report(self) -> str:
        """The snapshot in English words."""
        return "\n".join(map(join_line, self.report_lines()))

    def report_lines(self) -> list[NodeLine]:
        """The snapshot in words, for TPU Info."""
        now = self.snapshot()
        count = len(now["devices"])
        counted = {"count": str(count), "platform": str(now["platform"])}
        lines = [
            NodeText("info.device", {"platform": counted["platform"]})
            if count == 1
            else NodeText("info.devices", counted),
            *map(_device_line, now["devices"]),
        ]
        for entry in now["resident"]:
            size = _bytes(entry["bytes_per_device"])
            lines.append(NodeText("info.resident", {"name": _resident_name(entry), "size": size}))
            lines += _sharding_lines(entry["sharding"]) if count > 1 else []
        if not now["resident"]:
            lines.append(NodeText("info.nothing_resident"))
        compiled = now["compiled"]
        made = {
            "count": compiled["programs"],
            "seconds": f"{compiled['seconds']:.1f}",
            "cached": compiled["from_cache"],
        }
        lines.append(NodeText("info.programs", {name: str(value) for name, value in made.items()}))
        if now["step_seconds"] is not None:
            lines.append(NodeText("info.steps", {"seconds": f"{now['step_seconds']:.2f}"}))
        for entry in now["fallbacks"]:
            values = {"what": entry["what"], "reason": entry["reason"]}
            place = {} if entry["node"] is None else {"node": str(entry["node"])}
            lines.append(NodeText("info.on_host_node" if place else "info.on_host", values | place))
        return [[line] for line in lines]

    def _record_program(self, progress: Progress, now: float) -> None:
        if not progress.done:
            self._compiling_since = now  # the second time, when the cache has been asked
            return
        counter = "from_cache" if progress.from_cache else "programs"
        self._compiled[counter] += 1
        if not progress.from_cache:
            self._compiled["seconds"] += now - self._compiling_since
            self._compiled["last"] = progress.label
            self._compiled["latest"] = {"model": progress.model, "part": progress.part, "size": progress.size}

    def _step_seconds(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None


def _activity_line(activity: dict[str, Any], step: float | None) -> NodeLine:
    stage, size, done, total = (activity[name] for name in ("stage", "size", "done", "total"))
    counted = {"done": str(done), "total": str(total)}
    shown = [size_text(size)] if size else []
    if stage == "loading" and total:
        done_bytes, total_bytes = _size(done, total)
        values = {"part": part_text(activity["part"]), "done": done_bytes, "total": total_bytes}
        return [NodeText("node.loading_bytes", values)]
    if stage == "loading":
        return [NodeText("node.loading", {"model": activity["model"]})]
    if stage in ("preparing", "compiling"):
        return [NodeText(f"node.{stage}_size", {"size": shown[0]}) if shown else NodeText(f"node.{stage}")]
    if stage == "encoding":
        return [NodeText("node.encoding_image" if "image" in activity["what"] else "node.encoding_prompt")]
    if stage == "denoising":
        line = [*shown, NodeText("node.denoising", counted)]
        if step is not None:
            line.append(NodeText("seconds_per_step", {"seconds": f"{step:.2f}"}))
        if step is not None and done < total:
            line.append(NodeText("left", {"time": clock_time(step * (total - done))}))
        return line
    if stage == "decoding":
        return [*shown, NodeText("node.decoding", counted)]
    return []


def _size(done: int, total: int) -> tuple[str, str]:
    unit, name = _unit(total)
    return f"{done / unit:.1f}", f"{total / unit:.1f} {name}"


def _bytes(count: int) -> str:
    unit, name = _unit(count)
    return f"{count / unit:.1f} {name}"


def _unit(count: int) -> tuple[float, str]:
    return (1e9, "GB") if count >= 1e8 else (1e6, "MB")


def _device_line(device: dict[str, Any]) -> NodeText:
    values = {"id": str(device["id"]), "kind": device["kind"], "weights": _bytes(device["weights_bytes"])}
    if device["used_bytes"] is None or not device["limit_bytes"]:
        return NodeText("info.memory", values)
    used = {"used": _bytes(device["used_bytes"]), "limit": _bytes(device["limit_bytes"])}
    return NodeText("info.memory_used", values | used)


def _resident_name(entry: dict[str, Any]) -> str | NodeText:
    model, part = entry["model"], part_text(entry["part"])
    if model and str(part):
        return NodeText("info.model_part", {"model": model, "part": part})
    return model or part or entry["label"]


def _sharding_lines(sharding: dict[str, Any] | None) -> list[NodeText]:
    if sharding is None:
        return []
    from comfy_tpu.config import MeshSizes
    from comfy_tpu.parallel.report import format_gb

    values = {"mesh": str(MeshSizes(**sharding["mesh"])), "tensors": str(sharding["total"]["tensors"])}
    values |= {"size": format_gb(sharding["total"]["nbytes"])}
    values |= {"per_device": format_gb(sharding["total"]["bytes_per_device"])}
    for name in ("sharded", "gathered", "replicated"):
        values |= {name: str(sharding[name]["tensors"]), f"{name}_size": format_gb(sharding[name]["nbytes"])}
    lines = [NodeText("info.sharding", values)]
    if sharding["could_not_split"]:
        lines.append(NodeText("info.could_not_split", {"names": join_names(sharding["could_not_split"])}))
    return lines


def _check_devices() -> None:
    """Raises MeshError on a machine whose TPU another process holds: JAX itself would say nothing and take the CPU."""
    import_jax()
    from comfy_tpu.parallel.mesh import find_devices

    find_devices()


def _devices() -> dict[str, Any]:
    import_jax()
    import jax

    from comfy_tpu.compiler.residency import shared_residency

    residency = shared_residency()
    weights = residency.bytes_per_device()
    devices = []
    for device in jax.local_devices():
        memory = device.memory_stats() or {}  # a CPU has none
        devices.append(
            {
                "id": device.id,
                "kind": device.device_kind,
                "weights_bytes": weights.get(device, 0),
                "used_bytes": memory.get("bytes_in_use"),
                "limit_bytes": memory.get("bytes_limit"),
            }
        )
    resident = [
        {
            "label": entry.label,
            "model": entry.model,
            "part": entry.part,
            "bytes_per_device": entry.bytes_per_device,
            "in_use": entry.in_use,
            "sharding": entry.sharding.as_dict() if entry.sharding else None,
        }
        for entry in residency.entries()
    ]
    return {"platform": jax.default_backend(), "devices": devices, "resident": resident}


STATUS = Status()
"""The status of this process."""
