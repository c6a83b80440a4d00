"""The migration guide's two checklists: what to know before a port, what to verify after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from comfy_tpu.porting.traps import Finding
from comfy_tpu.porting.trial import Trial

Status = Literal["pass", "fail", "not applicable"]

ATTENTION = "scaled_dot_product_attention"


@dataclasses.dataclass(frozen=True)
class Item:
    text: str
    status: Status
    note: str = ""


def before(findings: Iterable[Finding], trial: Trial | None, *, has_family: bool) -> list[Item]:
    found = list(findings)
    return [
        _free("No GPU-only code (CUDA, flash attention, NCCL)", found, "cuda", "distributed", "gpu-only-import"),
        _free(
            "No decision or number from the value of a tensor (if, assert, .item())",
            found,
            *("tensor-condition", "tensor-assert", "tensor-to-number"),
        ),
        _free(
            "Tensors made in the forward are made on the device, with known shapes",
            found,
            *("host-tensor-written", "data-dependent-shape", "random-in-forward", "python-random"),
        ),
        _free("No indexing by boolean masks", found, "mask-indexing"),
        _dtypes(found, trial),
        _attention(found, trial),
        _sharding(found, trial, has_family=has_family),
    ]


def after(trial: Trial | None, threads_left: Iterable[str] = ()) -> list[Item]:
    left = list(threads_left)
    ended = Item("The program ends by itself", "not applicable", "not tried")
    dtype = Item("The result is bfloat16", "not applicable", "not tried")
    memory = Item("Several steps leave nothing behind on the device", "not applicable", "not tried")
    if trial is not None and trial.refusal is None:
        note = f"still running: {', '.join(left)}" if left else ""
        ended = Item(ended.text, "fail" if left else "pass", note)
    if trial is not None and trial.low_precision is not None:
        narrow = trial.low_precision == "bfloat16"
        dtype = Item(dtype.text, "pass" if narrow else "fail", "" if narrow else f"it is {trial.low_precision}")
    if trial is not None and trial.arrays_left is not None:
        note = "at full size, ask comfy-tpu plan" if trial.arrays_left <= 0 else f"{trial.arrays_left} arrays more"
        memory = Item(memory.text, "pass" if trial.arrays_left <= 0 else "fail", note)
    speed = Item("It is as fast as expected", "not applicable", "needs the device: comfy-tpu bench")
    return [ended, dtype, memory, speed]


def _free(text: str, findings: list[Finding], *traps: str) -> Item:
    places = [each.place for each in findings if each.trap in traps and each.reached is not False]
    first = next((f", the first at {place}" for place in places if place), "")
    note = f"{len(places)} found{first}" if places else ""
    return Item(text, "fail" if places else "pass", note)


def _dtypes(findings: list[Finding], trial: Trial | None) -> Item:
    item = _free("Dtypes stay what they were given", findings, "dtype-drift", "float64")
    if item.status == "pass" and (trial is None or trial.low_precision is None):
        return Item(item.text, "not applicable", "not tried in bfloat16")
    return item


def _attention(findings: list[Finding], trial: Trial | None) -> Item:
    text = "Attention can run as a TPU kernel"
    square = _free(text, findings, "square-mask")
    if square.status == "fail" or trial is None:
        return square if square.status == "fail" else Item(text, "not applicable", "not tried")
    if any(ATTENTION in operator.name for operator in trial.rows):
        return Item(text, "pass")
    return Item(text, "not applicable", f"{ATTENTION} is not called")


def _sharding(findings: list[Finding], trial: Trial | None, *, has_family: bool) -> Item:
    text = "Sharding rules know every large weight"
    if trial is None:
        return Item(text, "not applicable", "not tried")
    item = _free(text, findings, "no-sharding-rule")
    if item.status == "pass" and not has_family:
        return Item(text, "pass", "by the usual names of layers; no family has this class yet")
    return item
