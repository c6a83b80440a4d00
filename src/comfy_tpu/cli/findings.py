"""Findings as lines of text, for the commands that report some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from comfy_tpu.diagnosis import Finding
from comfy_tpu.terminal_text import escape_controls

SYMBOLS = {"ok": "✓", "warning": "!", "blocked": "✗"}
ASCII_SYMBOLS = {"ok": "+", "warning": "!", "blocked": "x"}


def finding_lines(findings: Sequence[Finding], encoding: str) -> list[str]:
    width = max(len(finding.name) for finding in findings)
    symbols = _symbols(encoding)
    lines = []
    for finding in findings:
        lines.append(f"{symbols[finding.status]} {finding.name:<{width}}  {finding.detail}")
        if finding.fix:
            lines.append(f"  {'':<{width}}  fix: {finding.fix}")
    return lines


def verdict(findings: Iterable[Finding]) -> str:
    statuses = [finding.status for finding in findings]
    blocked, warnings = statuses.count("blocked"), statuses.count("warning")
    if blocked:
        return f"Not ready: {blocked} to mend first, {warnings} more to look at."
    if warnings:
        return f"Ready, with {warnings} to look at."
    return "Ready."


def printable(lines: Iterable[str], encoding: str) -> str:
    """Joins the lines of a report, without control characters and characters that the encoding lacks."""
    return escape_controls("\n".join(lines)).encode(encoding, "replace").decode(encoding)


def _symbols(encoding: str) -> dict[str, str]:
    try:
        "".join(SYMBOLS.values()).encode(encoding)
    except UnicodeEncodeError:
        return ASCII_SYMBOLS
    return SYMBOLS
