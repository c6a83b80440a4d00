"""The two checklists of docs/porting.md: before a port, and after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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


SPEED_FACTOR = 1.5
"""How many times the plan's estimate a measured step may take and still be as fast as expected. The shares of a chip's
peak in the plan are those of one published run on v6e; on other generations they are guesses."""
MEASURE = "comfy-tpu bench --what transformer --peers ours --model MODEL --mesh auto --json FILE"


@dataclasses.dataclass(frozen=True)
class Speed:
    """A step that was measured, beside what the plan's formulas say of it."""

    seconds: float
    expected: float
    where: str
    """The size, the device and the mesh."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.expected


_TRAP_ITEMS = {
    "No GPU-only code (CUDA, flash attention, NCCL)": ("cuda", "distributed", "gpu-only-import"),
    "No decision or number from the value of a tensor (if, assert, .item())": (
        *("tensor-condition", "tensor-assert", "tensor-to-number"),
    ),
    "Tensors made in the forward are made on the device, with known shapes": (
        *("host-tensor-written", "data-dependent-shape", "random-in-forward", "python-random"),
    ),
    "No indexing by boolean masks": ("mask-indexing",),
}
"""Items that pass without findings of these traps."""


def list_before_port(findings: Sequence[Finding], trial: Trial | None, *, has_family: bool) -> list[Item]:
    """The checklist before a port."""
    items = [_trap_item(text, findings, *traps) for text, traps in _TRAP_ITEMS.items()]
    sharding = _sharding_item(findings, trial, has_family=has_family)
    return [*items, _dtype_item(findings, trial), _attention_item(findings, trial), sharding]


def list_after_port(
    trial: Trial | None, threads_left: Sequence[str] = (), speed: Speed | None = None, no_speed: str = ""
) -> list[Item]:
    """The checklist after a port. `threads_left`: names of threads that still run; `no_speed`: why there is no measured
    speed."""
    trial = trial or Trial(refusal="not tried")
    ends = None if trial.refusal is not None else not threads_left
    is_narrow = None if trial.low_precision is None else trial.low_precision == "bfloat16"
    is_clean = None if trial.arrays_left is None else trial.arrays_left <= 0
    return [
        _trial_item("The program ends by itself", ends, f"still running: {', '.join(threads_left)}"),
        _trial_item("The result is bfloat16", is_narrow, f"it is {trial.low_precision}"),
        _trial_item(
            "Several steps leave nothing behind on the device",
            is_clean,
            f"{trial.arrays_left} arrays more",
            "at full size, ask comfy-tpu plan",
        ),
        _speed_item(speed, no_speed),
    ]


def _speed_item(speed: Speed | None, no_speed: str) -> Item:
    text = "It is as fast as expected"
    if speed is None:
        return Item(text, "not applicable", f"{no_speed or 'not measured'}; on the TPU: {MEASURE}, then --bench FILE")
    note = (
        f"{speed.seconds:.3g} s a step at {speed.where}, {speed.ratio:.2f} times the plan's {speed.expected:.3g} s; "
        f"{SPEED_FACTOR} are allowed"
    )
    return Item(text, "pass" if speed.ratio <= SPEED_FACTOR else "fail", note)


def _trial_item(text: str, is_passed: bool | None, fail_note: str, pass_note: str = "") -> Item:
    if is_passed is None:
        return Item(text, "not applicable", "not tried")
    return Item(text, "pass", pass_note) if is_passed else Item(text, "fail", fail_note)


def _trap_item(text: str, findings: Sequence[Finding], *traps: str) -> Item:
    places = [each.place for each in findings if each.trap in traps and each.reached is not False]
    first = next((f", the first at {place}" for place in places if place), "")
    note = f"{len(places)} found{first}" if places else ""
    return Item(text, "fail" if places else "pass", note)


def _dtype_item(findings: Sequence[Finding], trial: Trial | None) -> Item:
    item = _trap_item("Dtypes stay what they were given", findings, "dtype-drift", "float64")
    if item.status == "pass" and (trial is None or trial.low_precision is None):
        return Item(item.text, "not applicable", "not tried in bfloat16")
    return item


def _attention_item(findings: Sequence[Finding], trial: Trial | None) -> Item:
    text = "Attention can run as a TPU kernel"
    square = _trap_item(text, findings, "square-mask")
    if square.status == "fail" or trial is None:
        return square if square.status == "fail" else Item(text, "not applicable", "not tried")
    if any(ATTENTION in operator.name for operator in trial.rows):
        return Item(text, "pass")
    return Item(text, "not applicable", f"{ATTENTION} is not called")


def _sharding_item(findings: Sequence[Finding], trial: Trial | None, *, has_family: bool) -> Item:
    text = "Sharding rules know every large weight"
    if trial is None:
        return Item(text, "not applicable", "not tried")
    item = _trap_item(text, findings, "no-sharding-rule")
    if item.status == "pass" and not has_family:
        return Item(text, "pass", "by the usual names of layers; no family has this class yet")
    return item
