"""Videos a minute of `comfy-tpu batch`, of a Python loop over one pipeline, and of a shell loop over `generate`.

    python -m benchmarks.batch.overlap --count 100 --shell-count 10 --json benchmarks/batch/overlap-cpu.json

All three make the same prompts with warm caches of programs, in one run; the shell loop, where every video starts a
process, may make fewer of them. The rate of a loop does not count its first video, which loads the model.
`processor_seconds` are those of a video; times its rate, they are the cores that were used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import comfy_tpu

COLOURS = ("red", "green", "blue", "orange", "white", "purple")
SHAPES = ("circle", "square", "star", "triangle")
MOTIONS = ("moving left", "moving right", "moving up", "moving down", "growing")


def prompts(count: int) -> list[str]:
    every = [f"a {colour} {shape} {motion}" for motion in MOTIONS for shape in SHAPES for colour in COLOURS]
    return [every[number % len(every)] for number in range(count)]


def python_loop(count: int, out: Path) -> dict[str, float]:
    """Videos a second of the loop that a user would write."""
    pipe = comfy_tpu.open("demo")
    for number, prompt in enumerate(prompts(count)):
        if number == 1:
            started, used = time.monotonic(), time.process_time()
        pipe(prompt, seed=number).save(out / f"{number}.mp4")
    return {
        "steady": (count - 1) / (time.monotonic() - started),
        "processor_seconds": (time.process_time() - used) / (count - 1),
    }


def shell_loop(count: int, out: Path) -> float:
    started = time.monotonic()
    for number, prompt in enumerate(prompts(count)):
        words = ["generate", prompt, "--seed", str(number), "-o", str(out / f"{number}.mp4")]
        subprocess.run([sys.executable, "-m", "comfy_tpu.cli", *words], check=True, capture_output=True)
    return count / (time.monotonic() - started)


def batch(count: int, out: Path, *options: str) -> dict[str, float]:
    """Videos a second of the whole command, and from the first finished group on."""
    jobs = out / "jobs.jsonl"
    lines = [
        {"prompt": prompt, "seed": number, "output": f"{number}.mp4"} for number, prompt in enumerate(prompts(count))
    ]
    jobs.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "comfy_tpu.cli", "batch", str(jobs), "-o", str(out), "--json", *options]
    started, finished = time.monotonic(), list[tuple[float, float]]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "done":
                finished.append((time.monotonic(), processor_seconds(process.pid)))
    assert process.returncode == 0
    first = sum(1 for at, _ in finished if at - finished[0][0] < 0.05)  # of one group
    (begun, used_before), (ended, used) = finished[first - 1], finished[-1]
    return {
        "whole": count / (time.monotonic() - started),
        "steady": (count - first) / (ended - begun) if count > first else 0.0,
        "processor_seconds": (used - used_before) / (count - first) if count > first else 0.0,
    }


def processor_seconds(process: int) -> float:
    """Of all threads of a running process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--shell-count", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        places = {name: Path(directory, name) for name in ("warm", "shell", "python", "batch", "alone")}
        for place in places.values():
            place.mkdir()
        batch(9, places["warm"])  # compiles what the others find in the cache
        rates: dict[str, Any] = {
            "shell loop": shell_loop(arguments.shell_count, places["shell"]),
            "python loop": python_loop(arguments.count, places["python"]),
            "batch, one by one": batch(arguments.count, places["alone"], "--batch-size", "1"),
            "batch": batch(arguments.count, places["batch"]),
        }
    result = {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "count": arguments.count,
        "videos_per_second": rates,
        "times_the_shell_loop": rates["batch"]["whole"] / rates["shell loop"],
        "times_the_python_loop": rates["batch"]["steady"] / rates["python loop"]["steady"],
    }
    text = json.dumps(result, indent=2)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
