"""Reports of checks, as text and as JSON.

The JSON has one object for every model that was checked. Its keys stay; new ones may be added:

    target          the class
    file            where it is defined
    verdict         "will run", "may run" (only read), "will not run" or "not tried"
    why             one sentence
    findings        trap, severity ("stops", "changes", "costs"), file, line, code, reason, fix, guide (where the trap
                    is explained), reached (whether the trial ran the line; null: nothing was tried)
    before, after   the two checklists: text, status ("pass", "fail", "not applicable"), note
    operators       name, by ("torchax", "comfy-tpu", "missing"), how; null if nothing was tried
    operators_end   the line, and why, where that list ends before the model does, or null
    error           of the small compiled model against PyTorch, or null
    config          of the small model, or null
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from comfy_tpu.porting.check import Check
from comfy_tpu.porting.checklists import Item
from comfy_tpu.porting.traps import SEVERITIES, Finding
from comfy_tpu.porting.trial import Operator

SCHEMA = 1
_MARKS = {"pass": "pass", "fail": "FAIL", "not applicable": "n/a "}


def format_json(checks: Iterable[Check]) -> str:
    checks = list(checks)
    document = {
        "schema": SCHEMA,
        "blocked": any(check.blocked for check in checks),
        "checks": [_check_document(check) for check in checks],
    }
    return json.dumps(document, indent=2, default=str)


def _check_document(check: Check) -> dict[str, Any]:
    trial = check.trial
    return {
        "target": check.target.name,
        "file": str(check.target.definition.module.path),
        "verdict": check.verdict,
        "why": check.why,
        "findings": [{**dataclasses.asdict(finding), "guide": finding.guide} for finding in check.findings],
        "before": [dataclasses.asdict(item) for item in check.before],
        "after": [dataclasses.asdict(item) for item in check.after],
        "operators": None if trial is None else [dataclasses.asdict(each) for each in trial.operators],
        "operators_end": None if trial is None else trial.operators_end,
        "error": None if trial is None or trial.error in (None, float("inf")) else trial.error,
        "config": check.config,
    }


def format_text(checks: Iterable[Check]) -> str:
    return "\n\n".join("\n".join(_check_lines(check)) for check in checks)


def _check_lines(check: Check) -> list[str]:
    lines = [f"{check.target.name}  {check.target.definition.module.path}", ""]
    reached = [finding for finding in check.findings if finding.reached is not False]
    for severity, meaning in SEVERITIES.items():
        chosen = [finding for finding in reached if finding.severity == severity]
        if chosen:
            lines += [f"{meaning[0].upper()}{meaning[1:]}:", *_finding_lines(chosen), ""]
    beside = [finding for finding in check.findings if finding.reached is False]
    if beside:
        lines.append("Would matter, but the trial did not come this way:")
        lines += [f"  {finding.place}  {finding.trap}: {finding.code}" for finding in beside]
        lines.append("")
    lines += ["Before the port:", *_item_lines(check.before), "", "After the port:", *_item_lines(check.after), ""]
    lines.append(f"{check.verdict[0].upper()}{check.verdict[1:]}: {check.why}.")
    return lines


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        lines.append(f"  {finding.place}  {finding.trap}" if finding.place else f"  {finding.trap}")
        if finding.code:
            lines.append(f"      {finding.code}")
        lines += [f"      {finding.reason}", f"      fix: {finding.fix}", f"      see: {finding.guide}"]
    return lines


def _item_lines(items: Sequence[Item]) -> list[str]:
    return [f"  {_MARKS[item.status]}  {item.text}{f' ({item.note})' if item.note else ''}" for item in items]


def format_operators(operators: Sequence[Operator], ends: Sequence[str]) -> str:
    width = max((len(operator.name) for operator in operators), default=0)
    lines = [f"{operator.name:<{width}}  {operator.by:<9}  {operator.how}" for operator in operators]
    missing = sum(operator.by == "missing" for operator in operators)
    lines += ["", f"{len(operators)} operators, {missing} missing."]
    lines += [f"The list ends at {end}; there may be more behind it." for end in ends]
    return "\n".join(lines)
