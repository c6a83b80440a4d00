"""The check of one model: its source is read, a small one is tried, and the two correct each other."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.porting import checklists
from comfy_tpu.porting.checklists import Item, Speed
from comfy_tpu.porting.small_models import full_skeleton, make_small_model
from comfy_tpu.porting.source import method
from comfy_tpu.porting.structure import rules_for, uneven_blocks, unknown_weights
from comfy_tpu.porting.targets import Target
from comfy_tpu.porting.traps import Finding
from comfy_tpu.porting.trial import Trial, try_small
from comfy_tpu.porting.visitor import SourceVisitor

Verdict = Literal["will run", "may run", "will not run", "not tried"]
"""`may run`: only read, and nothing was found that stops it. `not tried`: no small one could be made and run, or it
gave nothing to compare."""

DISPROVED_BY_A_TRACE = frozenset(
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
    before: tuple[Item, ...]
    after: tuple[Item, ...]
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
    definition = target.definition
    decodes = method(definition, "decode") is not None and method(definition, "encode") is not None
    visitor.read_class(definition, ("decode",) if decodes else ("forward",))
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
    has_family = bool(rules_for(target.name))
    if static:
        stopping = [each for each in findings if each.severity == "stops"]
        verdict: Verdict = "will not run" if stopping else "may run"
        why = _counted(stopping) if stopping else "nothing was found that stops the trace"
        items = checklists.before(findings, None, has_family=has_family)
        later = checklists.after(None, speed=speed, no_speed=no_speed)
        return Check(target, verdict, why, tuple(findings), tuple(items), tuple(later))
    threads = set(threading.enumerate())
    trial: Trial | None = None
    tried: Mapping[str, Any] | None = None
    why = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own, and many: what matters of them is among the findings
        try:
            small = make_small_model(target, config=config, inputs=inputs)
            tried = small.config
            trial = try_small(small, {each.file for each in findings})
            model = full_skeleton(target) or small.skeleton
            place = (str(target.definition.module.path), target.definition.node.lineno)
            structure = [*uneven_blocks(model), *unknown_weights(model, place)]
        except InvalidValueError:
            raise
        except ComfyTpuError as error:
            why, structure = str(error), []
        except Exception as error:  # noqa: BLE001 whatever the model raises when it is built
            why, structure = f"{target.name} cannot be built ({type(error).__name__}: {error})", []
    if trial is not None:
        findings = corrected(findings, trial)
        findings = sorted([*findings, *structure], key=lambda each: (each.file, each.line, each.trap))
    left = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    verdict, why = judged(findings, trial, why)
    return Check(
        target,
        verdict,
        why,
        tuple(findings),
        tuple(checklists.before(findings, trial, has_family=has_family)),
        tuple(checklists.after(trial, left, speed, no_speed)),
        trial,
        tried,
    )


def _counted(stopping: list[Finding]) -> str:
    lines = list(dict.fromkeys(each.place for each in stopping if each.file))
    if not lines:
        return stopping[0].reason
    return f"{'1 line stops' if len(lines) == 1 else f'{len(lines)} lines stop'} the trace, the first is {lines[0]}"


def corrected(findings: list[Finding], trial: Trial) -> list[Finding]:
    """The findings of the reader without those that the trial disproved, and with those that only a trial sees."""
    kept = []
    for each in findings:
        reached = each.trap == "gpu-only-import" or (each.file, each.line) in trial.reached
        if trial.traced and reached and each.trap in DISPROVED_BY_A_TRACE:
            continue
        unknown = not trial.is_complete and not reached
        kept.append(dataclasses.replace(each, reached=None if unknown else reached))
    known = {(each.file, each.line) for each in kept}
    traps = {each.trap for each in kept if each.reached}
    for each in trial.findings:
        explained = each.trap in (*DISPROVED_BY_A_TRACE, "trace") and (each.file, each.line) in known
        if not explained and not (each.trap == "square-mask" and "square-mask" in traps):
            kept.append(dataclasses.replace(each, reached=True))
    return kept


def judged(findings: list[Finding], trial: Trial | None, why: str) -> tuple[Verdict, str]:
    stopping = [each for each in findings if each.severity == "stops" and each.reached is not False]
    if trial is None or trial.refusal is not None:
        why = why or (trial.refusal if trial and trial.refusal else "")
        if stopping:
            return "will not run", f"{_counted(stopping)}; no small model was tried: {why}"
        return "not tried", why
    if trial.runs and not stopping:
        return "will run", f"traced, lowered for a TPU, and {trial.error:.1e} from PyTorch at a small size"
    if stopping:
        return "will not run", _counted(stopping)
    return "will not run", trial.findings[0].reason if trial.findings else "the trial did not come to its end"
