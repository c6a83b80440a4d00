"""Run as a process of its own: measure one part, and write what comes out as lines of JSON to the standard output.

A line is {"row": …}, {"note": …} or {"machine": …}. The job comes in on the standard input.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from comfy_tpu.bench.job import DEVICES, Job
from comfy_tpu.bench.results import Row
from comfy_tpu.bench.vae_choices import INPUTS, START, TURNS

# What a part is measured by. Imported in its process only: a compilation for eight CPU devices wants other flags than
# a forward on a GPU.
PARTS: Mapping[str, tuple[str, str]] = {
    "transformer": ("comfy_tpu.bench.transformer", "measure_transformer"),
    "accuracy": ("comfy_tpu.bench.transformer", "measure_accuracy"),
    "vae": ("comfy_tpu.bench.vae", "measure_vae"),
    "text": ("comfy_tpu.bench.text", "measure_text"),
    "end-to-end": ("comfy_tpu.bench.end_to_end", "measure_end_to_end"),
    "scaling": ("comfy_tpu.bench.scaling", "measure_tokens"),
    DEVICES: ("comfy_tpu.bench.scaling", "measure_devices"),
    "compile": ("comfy_tpu.bench.startup", "measure_startup"),
    INPUTS: ("comfy_tpu.bench.vae_inputs", "make_inputs"),
    START: ("comfy_tpu.bench.vae_start", "measure_start"),
    TURNS: ("comfy_tpu.bench.vae_start", "measure_turns"),
}


class Messages:
    """The way back to whoever started the process."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def row(self, row: Row) -> None:
        self._send({"row": row.to_json()})

    def note(self, text: str) -> None:
        self._send({"note": text})

    def machine(self, facts: Mapping[str, Any]) -> None:
        self._send({"machine": dict(facts)})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def work(job: Job, messages: Messages) -> None:
    if job.part == "machine":
        from comfy_tpu.bench.machine import describe_machine

        messages.machine(describe_machine())
        return
    module, function = PARTS[job.part]
    try:
        getattr(importlib.import_module(module), function)(job, messages)
    except Exception as error:  # noqa: BLE001 - what happened goes into the results
        from comfy_tpu.bench.timing import failed

        messages.row(failed(Row(job.part, "the part itself", "", size=job.size), error))


def main() -> None:
    # Libraries print to the standard output; here only messages may.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("comfy_tpu.parallel.mesh").setLevel(logging.ERROR)  # the run says itself, once, what it runs on
    job = Job.from_json(json.load(sys.stdin))
    work(job, Messages(out))


if __name__ == "__main__":
    main()
