"""comfy-tpu doctor: print what the diagnosis found.

With --json, one object. Its keys stay; new ones may be added:

    schema          1
    blocked         true if the exit status is 1
    python          version, executable, required
    versions        installed version, or null, by distribution name
    devices         platform ("tpu", "gpu", "cpu", or null), devices (id, kind, memory_bytes), requested
                    (JAX_PLATFORMS), messages, error, tracing (why torch code cannot be traced, or null)
    hardware        tpu, tpu_variable, nvidia, nvidia_driver: what the system shows, whether or not JAX can use it
    host_memory     total_bytes, available_bytes
    compile_cache   path, exists, writable, entries, size_bytes, free_bytes
    model_cache     the same
    findings        name, status ("ok", "warning", "blocked"), detail, fix (or null)

A fact that could not be had is null, and a finding says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from comfy_tpu.diagnosis import Finding, Report, examine

SYMBOLS = {"ok": "✓", "warning": "!", "blocked": "✗"}
ASCII_SYMBOLS = {"ok": "+", "warning": "!", "blocked": "x"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    report = examine()
    print(as_json(report) if arguments.json else as_text(report, sys.stdout.encoding))
    return 1 if report.blocked else 0


def as_json(report: Report) -> str:
    document: dict[str, Any] = {"schema": 1, "blocked": report.blocked, **dataclasses.asdict(report)}
    return json.dumps(document, indent=2)


def as_text(report: Report, encoding: str | None) -> str:
    encoding = encoding or "ascii"
    width = max(len(finding.name) for finding in report.findings)
    lines = [f"comfy-tpu {report.versions['comfy-tpu']}", ""]
    for finding in report.findings:
        lines += _lines(finding, width, _symbols(encoding))
    companions = [
        f"{name} {report.versions[name]}" for name in ("jaxlib", "libtpu", "torchvision") if report.versions.get(name)
    ]
    if companions:
        lines += ["", f"Also here: {', '.join(companions)}."]
    lines += ["", _verdict(report)]
    return "\n".join(lines).encode(encoding, "replace").decode(encoding)


def _symbols(encoding: str) -> dict[str, str]:
    try:
        "".join(SYMBOLS.values()).encode(encoding)
    except UnicodeEncodeError:
        return ASCII_SYMBOLS
    return SYMBOLS


def _lines(finding: Finding, width: int, symbols: dict[str, str]) -> list[str]:
    lines = [f"{symbols[finding.status]} {finding.name:<{width}}  {finding.detail}"]
    if finding.fix:
        lines.append(f"  {'':<{width}}  fix: {finding.fix}")
    return lines


def _verdict(report: Report) -> str:
    blocked = sum(finding.status == "blocked" for finding in report.findings)
    warnings = sum(finding.status == "warning" for finding in report.findings)
    if blocked:
        return f"Not ready: {blocked} to mend first, {warnings} more to look at."
    if warnings:
        return f"Ready, with {warnings} to look at."
    return "Ready."
