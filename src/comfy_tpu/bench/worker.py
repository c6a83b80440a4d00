"""Measures one part in a process of its own, and writes rows as lines of JSON to the standard output.

A line is {"row": …}, {"note": …}, {"machine": …} or {"refused": …}. The job is read from the standard input.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from comfy_tpu.bench.job import DEVICES, MACHINE, Job
from comfy_tpu.bench.results import Row
from comfy_tpu.errors import ComfyTpuError

Parts = Mapping[str, tuple[str, str]]
"""Part -> module and function that measure it. Imported in the part's process only: a compilation for eight CPU devices
needs other flags than a forward on a GPU."""

PARTS: Parts = {
    "transformer": ("comfy_tpu.bench.transformer", "measure_transformer"),
    "accuracy": ("comfy_tpu.bench.transformer", "measure_accuracy"),
    "vae": ("comfy_tpu.bench.vae", "measure_vae"),
    "text": ("comfy_tpu.bench.text", "measure_text"),
    "end-to-end": ("comfy_tpu.bench.end_to_end", "measure_end_to_end"),
    "scaling": ("comfy_tpu.bench.scaling", "measure_tokens"),
    DEVICES: ("comfy_tpu.bench.scaling", "measure_devices"),
    "compile": ("comfy_tpu.bench.compilation", "measure_compilation"),
}


class Messages:
    """Sends rows and remarks to the process that started this one."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def row(self, row: Row) -> None:
        self._send({"row": row.to_json()})

    def note(self, text: str) -> None:
        self._send({"note": text})

    def machine(self, facts: Mapping[str, Any]) -> None:
        self._send({"machine": dict(facts)})

    def refused(self, error: ComfyTpuError) -> None:
        self._send({"refused": str(error), "field": error.field})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def work(job: Job, messages: Messages, parts: Parts = PARTS) -> None:
    if job.part == MACHINE:
        from comfy_tpu.bench.machine import plan_run

        try:
            messages.machine(plan_run(job))
        except ComfyTpuError as error:
            messages.refused(error)
        return
    module, function = parts[job.part]
    try:
        getattr(importlib.import_module(module), function)(job, messages)
    except Exception as error:  # noqa: BLE001 - what happened goes into the results
        from comfy_tpu.bench.timing import failed

        messages.row(failed(Row(job.part, "the part itself", "", size=job.size), error))


def main(parts: Parts = PARTS) -> None:
    # Libraries print to the standard output; here only messages may.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("comfy_tpu.parallel.mesh").setLevel(logging.ERROR)  # the run says itself, once, what it runs on
    job = Job.from_json(json.load(sys.stdin))
    work(job, Messages(out), parts)


if __name__ == "__main__":
    main()
