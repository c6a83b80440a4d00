"""What a user waits for between the command and the first step, in new processes with warm caches, part by part.

    python -m benchmarks.start --model demo --json result.json
    python -m benchmarks.start --model blank-wan-14b --directory /scratch --size 480P --json result.json

The second model has the shapes of Wan 2.1 14B and zeros for weights, which take no room on the disk. The first process
compiles (`comfy-tpu warm`); of the others the fastest is reported, and what JAX traced, lowered and compiled in it.
With `--prompts N`, each of further processes makes N + 1 videos, and the times of all but the first are reported, from
the prompt to the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.start.blank_model import make_blank_model
from comfy_tpu.errors import InvalidValueError, rename_as_flag
from comfy_tpu.pipeline.atomic import check_directory, check_place

BLANK = "blank-wan-14b"
LEAST = {"runs": 1, "steps": 1, "prompts": 0}
_RUN = """
import json, os, sys, time
begin = float(os.environ["BEGIN"])
marks, work = {}, []
def mark(name):
    marks.setdefault(name, round(time.time() - begin, 3))
mark("python")
import comfy_tpu.cli.progress as progress_display
show = progress_display.Display.__call__
def listen():
    import jax.monitoring
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: work.append(name.rpartition("/")[2]))
def record(self, progress):
    if len(marks) == 1:
        listen()  # jax is imported by now, and no earlier than the command does it
    mark({"compiling": f"program {progress.what}"}.get(progress.stage, f"{progress.stage} {progress.what}".strip()))
    if progress.stage == "denoising" and progress.done == 1:
        mark("first step")
    show(self, progress)
progress_display.Display.__call__ = record
from comfy_tpu.cli.main import main
status = main(sys.argv[1:])
mark("done")
counted = [name for name in work if name.endswith(("trace_duration", "module_duration", "compile_duration"))]
print("RESULT" + json.dumps({"status": status, "seconds": marks, "traced, lowered or compiled": len(counted)}))
"""


_PROMPTS = """
import json, sys, time
from pathlib import Path
import comfy_tpu
from comfy_tpu.config import CacheConfig, RuntimeConfig
model, cache, directory, count = sys.argv[1:]
pipe = comfy_tpu.open(model, RuntimeConfig(cache=CacheConfig(directory=Path(cache))))
def make(number):
    begin, used = time.perf_counter(), time.process_time()
    pipe(f"a red circle moving right, {number}", seed=number).save(Path(directory) / f"{number}.mp4")
    return time.perf_counter() - begin, time.process_time() - used
make(0)
print("RESULT" + json.dumps([make(number) for number in range(1, int(count) + 1)]))
"""


def run(script: str, arguments: list[str]) -> Any:
    """What a script prints as its result, in a new process."""
    environment = {**os.environ, "BEGIN": str(time.time())}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    found = [line.removeprefix("RESULT") for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if done.returncode or not found:
        raise SystemExit(done.stderr or done.stdout)
    return json.loads(found[0])


def run_command(arguments: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = run(_RUN, arguments)
    if status := result.pop("status"):
        raise SystemExit(f"`comfy-tpu {' '.join(arguments)}` ended with status {status}")
    return result


def time_prompts(model: str, directory: Path, count: int, runs: int) -> dict[str, Any]:
    """The medians of videos that follow the first one of a process."""
    times = [run(_PROMPTS, [model, str(directory / "cache"), str(directory), str(count)]) for _ in range(runs)]
    seconds, processor = zip(*(video for process in times for video in process), strict=True)
    return {
        "seconds": round(statistics.median(seconds), 3),
        "processor seconds": round(statistics.median(processor), 3),
        "medians of processes": [round(statistics.median(wall for wall, _ in process), 3) for process in times],
        "least and most": [round(min(seconds), 3), round(max(seconds), 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help=f"demo, {BLANK} or a directory")
    parser.add_argument("--directory", type=Path, default=Path("outputs/start"), help="for the cache and the model")
    parser.add_argument("--size", help="as of generate; the model's own if none is given")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--prompts", type=int, default=0, metavar="N", help="further videos in each of further processes"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    _check(parser, given)
    model = given.model
    if model == BLANK:
        model = str(given.directory / BLANK)
        if not Path(model).exists():
            make_blank_model(Path(model))
    options = ["--cache-dir", str(given.directory / "cache")]
    options += ["--size", given.size] if given.size else []
    options += ["--steps", str(given.steps)] if given.steps else []
    first = run_command(["warm", model, *options])
    output = ["--output", str(given.directory / "x.npy")]
    later = [run_command(["generate", "a red circle", "--model", model, *options, *output]) for _ in range(given.runs)]
    result = {"model": given.model, "size": given.size, "warm": first, "start": min(later, key=_total)}
    result["all"] = [_total(each) for each in later]
    if given.prompts:
        result["further prompts"] = time_prompts(model, given.directory, given.prompts, given.runs)
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Ends with one sentence where an argument would make it fail after minutes; makes the directory."""
    for name, least in LEAST.items():
        value = getattr(given, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value} is too few; give {least} or more")
    try:
        given.directory.mkdir(parents=True, exist_ok=True)
        check_directory(given.directory, field="directory")
        if given.json is not None:
            check_place(given.json, field="json", new_directories=0)
    except OSError as error:
        parser.error(f"--directory {given.directory} cannot be made ({error.strerror}); choose another place")
    except InvalidValueError as error:
        parser.error(rename_as_flag(str(error), error.field, f"--{error.field}"))


def _total(result: dict[str, Any]) -> float:
    total: float = result["seconds"]["done"]
    return total


if __name__ == "__main__":
    main()
