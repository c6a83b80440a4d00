"""Videos a minute of `comfy-tpu batch`, of a Python loop over one pipeline, and of a shell loop over `generate`.

    python -m benchmarks.batch.overlap --count 100 --shell-count 10 --json benchmarks/batch/overlap-cpu.json

All three make the same prompts with warm caches of programs, in one run; the shell loop, where every video starts a
process, may make fewer of them. The rate of a loop does not count its first video, which loads the model.
"""

from __future__ import annotations

import argparse
import json
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


def python_loop(count: int, out: Path) -> float:
    """Videos a second of the loop that a user would write."""
    pipe = comfy_tpu.open("demo")
    for number, prompt in enumerate(prompts(count)):
        if number == 1:
            started = time.monotonic()
        pipe(prompt, seed=number).save(out / f"{number}.mp4")
    return (count - 1) / (time.monotonic() - started)


def shell_loop(count: int, out: Path) -> float:
    started = time.monotonic()
    for number, prompt in enumerate(prompts(count)):
        words = ["generate", prompt, "--seed", str(number), "-o", str(out / f"{number}.mp4")]
        subprocess.run([sys.executable, "-m", "comfy_tpu.cli", *words], check=True, capture_output=True)
    return count / (time.monotonic() - started)


def batch(count: int, out: Path, *options: str) -> dict[str, float]:
    """Videos a second from the first finished group on, and of the whole command."""
    jobs = out / "jobs.jsonl"
    lines = [
        {"prompt": prompt, "seed": number, "output": f"{number}.mp4"} for number, prompt in enumerate(prompts(count))
    ]
    jobs.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "comfy_tpu.cli", "batch", str(jobs), "-o", str(out), "--json", *options]
    started, finished = time.monotonic(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "done":
                finished.append(time.monotonic())
    assert process.returncode == 0
    first = sum(1 for each in finished if each - finished[0] < 0.05)  # of one group
    return {
        "whole": count / (time.monotonic() - started),
        "steady": (count - first) / (finished[-1] - finished[first - 1]) if count > first else 0.0,
    }


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
        "count": arguments.count,
        "videos_per_second": rates,
        "times_the_shell_loop": rates["batch"]["whole"] / rates["shell loop"],
        "times_the_python_loop": rates["batch"]["steady"] / rates["python loop"],
    }
    text = json.dumps(result, indent=2)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
