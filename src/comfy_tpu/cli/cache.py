"""comfy-tpu cache: lists, measures and empties the compile cache."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from comfy_tpu.cli import options
from comfy_tpu.cli.terminal import print_text

ACTIONS = ("size", "list", "clear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", default="size", metavar="ACTION", help=f"{', '.join(ACTIONS)} (size)")
    parser.add_argument(
        "--cache-dir", type=options.path_parser("--cache-dir"), metavar="DIR", help="the cache, if it is another one"
    )
    parser.add_argument(
        "--older-than",
        type=options.number_parser(float),
        metavar="DAYS",
        help="with clear: only what was not used for so long",
    )
    options.add_report(parser)


def run(arguments: argparse.Namespace) -> int:
    from comfy_tpu.compiler.cache import cache_directory, cache_limit
    from comfy_tpu.config import CacheConfig
    from comfy_tpu.errors import InvalidValueError

    if arguments.action not in ACTIONS:
        raise InvalidValueError(
            f"action={arguments.action} is unknown; choose from {', '.join(ACTIONS)}", field="action"
        )
    days = arguments.older_than
    if days is not None and arguments.action != "clear":
        raise InvalidValueError("older_than is for clear; leave it out", field="older_than")
    if days is not None and not (isinstance(days, float) and 0 <= days < float("inf")):
        raise InvalidValueError(f"older_than={days} is no number of days; give 0 or more", field="older_than")
    config = CacheConfig(directory=arguments.cache_dir)
    directory = cache_directory(config)
    report = {"directory": str(directory), "limit_bytes": cache_limit(config)}
    if arguments.action == "list":
        report |= {"programs": _list(directory)}
    elif arguments.action == "clear":
        report |= _clear(directory, days)
    report |= _measure(directory)
    print_text(json.dumps(report) if arguments.json else "\n".join(_lines(arguments.action, report)))
    return 0


def _measure(directory: Path) -> dict[str, int]:
    from comfy_tpu.compiler.stored.entries import list_files

    files = list_files(directory)
    return {"files": len(files), "bytes": sum(info.nbytes for info in files)}


def _clear(directory: Path, older_than: float | None) -> dict[str, int]:
    from comfy_tpu.compiler.stored.entries import list_files, remove_file

    before = time.time() - 86400 * (older_than or 0)
    removed = [info for info in list_files(directory) if older_than is None or info.used < before]
    return {"removed": sum(remove_file(info.path) for info in removed)}


def _list(directory: Path) -> list[dict[str, Any]]:
    """The stored programs, the last used first."""
    from comfy_tpu.compiler.stored.store import list_programs

    return [
        {"program": each.name, "device": each.device, "bytes": each.nbytes, "used": each.used}
        for each in list_programs(directory)
    ]


def _lines(action: str, report: dict[str, Any]) -> list[str]:
    from comfy_tpu.compiler.stored.entries import format_bytes

    lines = []
    for each in report.get("programs", ()):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each["used"]))
        lines.append(f"{used}  {format_bytes(each['bytes']):>9}  {each['device']:<8}  {each['program']}")
    if action == "clear":
        lines.append(f"{report['removed']} files removed")
    size, limit = format_bytes(report["bytes"]), format_bytes(report["limit_bytes"])
    if report["bytes"] <= report["limit_bytes"]:
        lines.append(f"{report['directory']}: {report['files']} files, {size} of at most {limit}")
    else:
        may_write = os.access(report["directory"], os.W_OK | os.X_OK)
        when = "when a model is opened" + ("" if may_write else " by somebody who may write there")
        lines.append(
            f"{report['directory']}: {report['files']} files, {size}, and the limit is {limit}: the least recently "
            f"used go {when}"
        )
    return lines
