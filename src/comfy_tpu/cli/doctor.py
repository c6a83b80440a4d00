"""comfy-tpu doctor: print what the diagnosis found.

With --json, one object. Its keys stay; new ones may be added:

    schema          1
    blocked         true if the exit status is 1
    python          version, executable, required
    versions        installed version, or null, by distribution name
    devices         platform ("tpu", "gpu", "cpu", or null), devices (id, kind, memory_bytes), requested
                    (JAX_PLATFORMS), messages, error, tracing (why torch code cannot be traced, or null), demo_models
                    (why each cannot be opened, or null), holders (pid, command and user of processes that hold the TPU)
    torch_extensions  for torchvision and torchaudio: version (or null), error (why torch and it do not import
                    together, or null)
    hardware        tpu, tpu_variable, nvidia, nvidia_driver: what the system shows, whether or not JAX can use it
    host_memory     total_bytes, available_bytes
    compile_cache   path, exists, writable, entries, size_bytes, free_bytes
    model_cache     the same
    model           with --model: name, family, directory, error (why it was not recognised), incomplete (what its files
                    lack), size (of its default request), mesh, components (name, bytes_on_disk, sharding as in the
                    JSON of plan), needed_bytes and usable_bytes of a device; else null
    hosts           with --coordinator: process, host, platform, devices, kind, problems of each; else null
    findings        name, status ("ok", "warning", "blocked"), detail, fix (or null)

A fact that could not be gathered is null, and a finding gives the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from typing import Any

from comfy_tpu.cli.findings import finding_lines, printable, verdict
from comfy_tpu.cli.hosts import add_hosts
from comfy_tpu.cli.options import add_ignored_keys, path_parser
from comfy_tpu.diagnosis import Report, examine, facts
from comfy_tpu.diagnosis.hosts import join_reports, summarize_host
from comfy_tpu.parallel import hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=path_parser("--model", str),
        metavar="MODEL",
        help="also look at a model: its files, whether it fits, how its weights would be split; no weight is read",
    )
    add_ignored_keys(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_hosts(parser)


def run(arguments: argparse.Namespace) -> int:
    look_at_model = functools.partial(facts.model, ignored_keys=arguments.ignore_config_key)
    report = examine(model=arguments.model, look_at_model=look_at_model)
    if names := hosts.host_names():
        summaries = hosts.gather(summarize_host(report))
        if not hosts.is_first_host():
            return 0
        report = join_reports(report, names, summaries)
    print(as_json(report) if arguments.json else as_text(report, sys.stdout.encoding))
    return 1 if report.blocked else 0


def as_json(report: Report) -> str:
    document: dict[str, Any] = {"schema": 1, "blocked": report.blocked, **dataclasses.asdict(report)}
    return json.dumps(document, indent=2)


def as_text(report: Report, encoding: str | None) -> str:
    encoding = encoding or "ascii"
    lines = [f"comfy-tpu {report.versions['comfy-tpu']}", "", *finding_lines(report.findings, encoding)]
    companions = [f"{name} {report.versions[name]}" for name in ("jaxlib", "libtpu") if report.versions.get(name)]
    if companions:
        lines += ["", f"Also here: {', '.join(companions)}."]
    return printable([*lines, "", verdict(report.findings)], encoding)
