"""Estimates of whole steps by the TPU compiler's schedules, one JSON file each: nothing runs on a TPU.

    python -m benchmarks.schedule.steps benchmarks/schedule/results

Each step is `comfy-tpu plan … --schedule --json` in a process of its own, with libtpu installed (x86_64), two to six
minutes each on two cores. Of the plan the chosen layout is kept, without the schedules of single programs.

With --programs, steps are read from NAME.zip in that directory, which another version may have exported: so one reader
estimates both. The kernel with a running maximum is in the programs of commit a27639c:

    comfy-tpu plan Wan-AI/Wan2.1-T2V-14B-Diffusers --tpu v6e-8 --size 1280x720x81 --mesh seed --no-compile \\
        --export programs/wan-720p-seed.zip
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WAN = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
HUNYUAN = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v"
STEPS = {
    "wan-720p-seed": (WAN, "--size", "1280x720x81", "--mesh", "seed"),
    "wan-480p-seed": (WAN, "--size", "832x480x81", "--mesh", "seed"),
    "wan-720p-auto": (WAN, "--size", "1280x720x81"),
    "wan-480p-auto": (WAN, "--size", "832x480x81"),
    "wan-720p-no-guidance-sp8": (WAN, "--size", "1280x720x81", "--no-guidance", "--mesh", "sp=8"),
    "hunyuanvideo-1.5-720p": (HUNYUAN, "--size", "1280x720x121"),
    "flux.1-dev-1024": ("black-forest-labs/FLUX.1-dev", "--size", "1024x1024"),
    "flux.2-dev-1024": ("black-forest-labs/FLUX.2-dev", "--size", "1024x1024"),
    "flux.2-klein-9b-1024": ("black-forest-labs/FLUX.2-klein-9B", "--size", "1024x1024"),
}
TPU = "v6e-8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=STEPS, nargs="*", default=list(STEPS))
    parser.add_argument("--programs", type=Path, help="a directory of exported programs to read instead")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        program = ("--from", arguments.programs / f"{name}.zip") if arguments.programs else (*STEPS[name], "--tpu", TPU)
        command = [sys.executable, "-m", "comfy_tpu.cli", "plan", *program, "--schedule", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.stdout.startswith("{"):
            sys.exit(f"{name}: {done.stderr.strip()}")
        plan = json.loads(done.stdout)
        layout = next(item for item in plan["layouts"] if item["mesh"] == plan["chosen"])
        result = {
            "model": plan["model"],
            "size": plan["size"],
            "tpu": plan["tpu"]["name"],
            "mesh": plan["chosen"],
            "refused": plan["refused"],
            **summarize(layout["compiled"]),
        }
        (arguments.directory / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(name, result["seconds"], flush=True)


def summarize(compiled: dict[str, Any] | None) -> dict[str, Any]:
    """What is kept of a compiled layout."""
    step = compiled and compiled["schedule"]
    if not compiled or not step:
        return {"seconds": None, "reason": compiled and compiled["schedule_refused"]}
    kept = summarize_schedule(step)
    operations = kept.pop("operations")
    return {
        **kept,
        "compile_seconds": compiled["seconds"],
        "peak_bytes": compiled["peak_bytes"],
        "allocated_bytes": compiled["memory"],
        "operations": operations,
    }


def summarize_schedule(step: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a schedule: totals, and every instruction that takes a thousandth of the time."""
    longest = [item for item in step["operations"] if item["times"] * item["seconds"] >= 1e-3 * step["seconds"]]
    kept = ("estimate", "compiler", "clock", "seconds", "by_part", "by_bound", "memory_bytes", "collectives")
    return {**{key: step[key] for key in (*kept, "branches", "unscheduled", "uncounted_loops")}, "operations": longest}


if __name__ == "__main__":
    main()
