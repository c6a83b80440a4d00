"""The check of one model: its source is read, a small one is tried, and the two correct each other."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from comfy_tpu.errors import ComfyTpuError, InvalidValueError, UnsupportedError
from comfy_tpu.porting.checklists import Item, Speed, list_after_port, list_before_port
from comfy_tpu.porting.small_models import SmallModel, full_skeleton, make_small_model
from comfy_tpu.porting.structure import family_rules, find_structure_traps
from comfy_tpu.porting.targets import Target
from comfy_tpu.porting.traps import Finding
from comfy_tpu.porting.trial import Operator, Trial, try_operators, try_small
from comfy_tpu.porting.visitor import SourceVisitor

Verdict = Literal["will run", "may run", "will not run", "not tried"]
"""`may run`: only read, and nothing was found that stops it. `not tried`: no small one could be made and run, or it
gave nothing to compare."""

DISPROVABLE_TRAPS = frozenset(
    (
        *("tensor-condition", "tensor-assert", "tensor-to-number", "mask-indexing", "data-dependent-shape"),
        *("host-tensor-written", "random-in-forward"),
    )
)
"""A trace that went through such a line shows that the value was known after all."""


@dataclasses.dataclass(frozen=True)
class Check:
    target: Target
    verdict: Verdict
    why: str
    findings: tuple[Finding, ...]
    before: tuple[Item, ...] = ()
    after: tuple[Item, ...] = ()
    trial: Trial | None = None
    config: Mapping[str, Any] | None = None
    """The configuration of the small model that was tried."""

    @property
    def blocked(self) -> bool:
        """Whether the verdict makes the command fail."""
        return self.verdict in ("will not run", "not tried")


def read_source(target: Target) -> list[Finding]:
    """The findings in a model's source. Nothing of it runs."""
    visitor = SourceVisitor()
    is_autoencoder = {"decode", "encode"} <= target.definition.methods.keys()
    visitor.read_class(target.definition, ("decode",) if is_autoencoder else ("forward",))
    return visitor.findings


def check(
    target: Target,
    *,
    static: bool = False,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    speed: Speed | None = None,
    no_speed: str = "",
) -> Check:
    """`speed` was measured with the model at full size; `no_speed` says why there is none."""
    findings = read_source(target)
    threads = set(threading.enumerate())
    small: SmallModel | None = None
    trial: Trial | None = None
    why: str | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own, and many: what matters of them is among the findings
        try:
            if not static:
                small = make_small_model(target, config=config, inputs=inputs)
                trial = try_small(small, {each.file for each in findings})
                findings = correct_findings(findings, trial)
                findings += find_structure_traps(full_skeleton(target) or small.skeleton, target.place)
        except InvalidValueError:
            raise
        except ComfyTpuError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 whatever the model raises when it is built
            why = f"{target.name} cannot be built ({type(error).__name__}: {error})"
    findings.sort(key=lambda each: (each.file, each.line, each.trap))
    left = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    return Check(
        target,
        *judge(findings, trial, why),
        tuple(findings),
        tuple(list_before_port(findings, trial, has_family=bool(family_rules(target.name)))),
        tuple(list_after_port(trial, left, speed, no_speed)),
        trial,
        small.config if small is not None else None,
    )


def check_small_model(target: Target, small: SmallModel) -> Check:
    """The same for a small model that is at hand, without checklists."""
    findings = read_source(target)
    trial = try_small(small, {each.file for each in findings})
    findings = correct_findings(findings, trial)
    return Check(target, *judge(findings, trial), tuple(findings), trial=trial, config=small.config)


def list_operators(
    target: Target, *, config: Mapping[str, Any] | None = None, inputs: Mapping[str, Any] | None = None
) -> tuple[list[Operator], str | None]:
    """The operators, and the place and reason where the list ends early."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = try_operators(make_small_model(target, config=config, inputs=inputs))
    if trial.refusal is not None:
        raise UnsupportedError(trial.refusal)
    return trial.operators, trial.operators_end


def correct_findings(findings: list[Finding], trial: Trial) -> list[Finding]:
    """The findings of the reader without those that the trial disproved, and with those that only a trial sees."""
    kept = []
    for each in findings:
        reached = each.trap == "gpu-only-import" or (each.file, each.line) in trial.reached
        if trial.traced and reached and each.trap in DISPROVABLE_TRAPS:
            continue
        unknown = not trial.is_complete and not reached
        kept.append(dataclasses.replace(each, reached=None if unknown else reached))
    known = {(each.file, each.line) for each in kept}
    traps = {each.trap for each in kept if each.reached}
    for each in trial.findings:
        explained = each.trap in (*DISPROVABLE_TRAPS, "trace") and (each.file, each.line) in known
        if not explained and not (each.trap == "square-mask" and "square-mask" in traps):
            kept.append(dataclasses.replace(each, reached=True))
    return kept


def judge(findings: list[Finding], trial: Trial | None, why: str | None = None) -> tuple[Verdict, str]:
    """The verdict and its reason; `why` no small model could be tried, None where none was to be."""
    stopping = [each for each in findings if each.severity == "stops" and each.reached is not False]
    lines = list(dict.fromkeys(each.place for each in stopping if each.file))
    count = "1 line stops" if len(lines) == 1 else f"{len(lines)} lines stop"
    found = f"{count} the trace, the first is {lines[0]}" if lines else ""
    refusal = why if trial is None else trial.refusal
    if stopping:
        found = found or stopping[0].reason
        return "will not run", found if refusal is None else f"{found}; no small model was tried: {refusal}"
    if refusal is not None:
        return "not tried", refusal
    if trial is None:
        return "may run", "nothing was found that stops the trace"
    if trial.runs:
        return "will run", f"traced, lowered for a TPU, and {trial.error:.1e} from PyTorch at a small size"
    return "will not run", trial.findings[0].reason if trial.findings else "the trial did not come to its end"
