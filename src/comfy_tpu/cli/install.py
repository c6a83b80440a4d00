"""comfy-tpu install: installs the pack into a ComfyUI, and lists what is missing before it can run there."""

from __future__ import annotations

import argparse
import shlex
import sys

from comfy_tpu.cli.findings import finding_lines, printable, verdict
from comfy_tpu.cli.options import path_parser
from comfy_tpu.cli.terminal import print_text
from comfy_tpu.diagnosis import Finding, examine, examine_comfyui
from comfy_tpu.installation import ComfyUI, Outcome, Pack, install_pack, remove_pack

SHOWN_FINDINGS = ("python", "devices", "tracing", "torchvision", "torchaudio", "demo models")
"""The doctor's findings that are always shown; others are shown if something is wrong. `comfy-tpu doctor` shows all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "comfyui_dir", type=path_parser("COMFYUI_DIR"), metavar="COMFYUI_DIR", help="the directory that holds main.py"
    )
    parser.add_argument("--copy", action="store_true", help="copy the files where links are not possible")
    parser.add_argument("--uninstall", action="store_true", help="take the pack out again; models and outputs stay")


def run(arguments: argparse.Namespace) -> int:
    comfyui = ComfyUI.open(arguments.comfyui_dir)
    if arguments.uninstall:
        print_text(remove_pack(comfyui).detail)
        return 0
    pack = Pack.here()
    comfyui.check_version(pack.required_comfyui)
    findings = _findings(comfyui, install_pack(comfyui, pack, copy=arguments.copy))
    encoding = sys.stdout.encoding or "ascii"
    blocked = any(finding.status == "blocked" for finding in findings)
    lines = [*finding_lines(findings, encoding), "", verdict(findings)]
    if not blocked:
        lines.append(
            f"Start it: cd {shlex.quote(str(comfyui.directory))} && {shlex.quote(sys.executable)} main.py --cpu"
        )
    print(printable(lines, encoding))
    return 1 if blocked else 0


def _findings(comfyui: ComfyUI, outcome: Outcome) -> list[Finding]:
    return [
        Finding("ComfyUI", "ok", f"{comfyui.version} ({comfyui.directory})"),
        Finding("pack", "ok", outcome.detail),
        *examine_comfyui(comfyui.directory),
        *(finding for finding in examine().findings if finding.status != "ok" or finding.name in SHOWN_FINDINGS),
    ]
