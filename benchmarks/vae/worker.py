"""Measures one part of the study in a process of its own."""

from __future__ import annotations

from benchmarks.vae.choices import INPUTS, START, TURNS
from comfy_tpu.bench.worker import Parts, main

PARTS: Parts = {
    INPUTS: ("benchmarks.vae.inputs", "make_inputs"),
    START: ("benchmarks.vae.start", "measure_start"),
    TURNS: ("benchmarks.vae.start", "measure_turns"),
}

if __name__ == "__main__":
    main(PARTS)
