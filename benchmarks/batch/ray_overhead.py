"""What a batch on Ray costs beside its jobs: time for each, the driver's memory, resuming, and reading many lines.

    python -m benchmarks.batch.ray_overhead --jobs 10000 --workers 32 --lines 1000000 --output benchmarks/batch/ray.json

Jobs write an image of 8×8 pixels (tests/jobs/ray_stand_in.py), and no model runs. Workers take no cores of the Ray that
is started, so that there may be more of them than cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT / 'tests' / 'jobs'}"
sys.path.insert(0, str(ROOT / "src"))


class Observer:
    """Samples the driver's memory as jobs finish."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._finished = 0
        self.first_at = 0.0
        self.memory_mib: list[float] = []

    def refused(self, refusal: Any) -> None:
        raise AssertionError(refusal)

    def submitted(self, counts: Any) -> None:
        pass

    def event(self, event: Any) -> None:
        pass

    def finished(self, outcome: Any, state: str, counts: Any) -> None:
        assert state == "done", outcome
        self.first_at = self.first_at or time.monotonic()
        self._finished += 1
        if self._finished % self._every == 0:
            self.memory_mib.append(read_memory())


def read_memory() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


def write_lines(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"job {number}", "seed": number}) + "\n")


def run_batch(jobs: Path, output: Path, workers: int, observer: Observer) -> dict[str, float]:
    from comfy_tpu.cli.batch import parse_values
    from comfy_tpu.jobs.driver import Batch
    from comfy_tpu.jobs.folder import Folder
    from comfy_tpu.jobs.ledger import Ledger
    from comfy_tpu.jobs.ray_workers import RayConfig, RayWorkers
    from comfy_tpu.jobs.sources import open_jobs

    begun = time.monotonic()
    folder = Folder(str(output))
    folder.prepare()
    with contextlib.closing(Ledger(folder.ledger_path)) as ledger, open_jobs(str(jobs)) as lines:
        batch = Batch(folder, ledger, observer)
        config = RayConfig(workers=workers, worker_module="ray_stand_in")
        with contextlib.closing(RayWorkers(folder, config, batch_size=None, report=print)) as pool:
            facts = pool.find_model_facts(parse_values({"prompt": "x"}, {}))
            started, processor = time.monotonic(), time.process_time()
            batch.submit(lines, lambda values: parse_values(values, {}), lambda request: facts)
            submitted = time.monotonic()
            counts = batch.run(pool)
            ended, processor = time.monotonic(), time.process_time() - processor
            batch.write_results()
            written = time.monotonic()
    assert counts.done == counts.total
    return {
        "start_s": started - begun,
        "submit_s": submitted - started,
        "run_s": ended - submitted,
        "results_s": written - ended,
        "driver_processor_s": processor,
    }


def read_many(path: Path, count: int) -> dict[str, float]:
    from comfy_tpu.jobs.sources import open_jobs

    before, begun = read_memory(), time.monotonic()
    with open_jobs(str(path)) as lines:
        found = sum(1 for _ in lines)
    assert found == count
    return {"lines": count, "seconds": time.monotonic() - begun, "memory_growth_mib": read_memory() - before}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        many = directory / "many.jsonl"
        write_lines(many, arguments.lines)
        result["reading"] = read_many(many, arguments.lines)
        many.unlink()
        jobs, output = directory / "jobs.jsonl", directory / "out"
        write_lines(jobs, arguments.jobs)
        observer = Observer(max(1, arguments.jobs // 10))
        first = run_batch(jobs, output, arguments.workers, observer)
        result |= {"jobs": arguments.jobs, "workers": arguments.workers, "first": first}
        result["ms_per_job"] = 1000 * (first["submit_s"] + first["run_s"]) / arguments.jobs
        result["driver_processor_ms_per_job"] = 1000 * first["driver_processor_s"] / arguments.jobs
        result["driver_memory_mib"] = observer.memory_mib
        result["resume_s"] = resume(jobs, output)
        result["load_at_end"] = os.getloadavg()[0]
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")


def resume(jobs: Path, output: Path) -> float:
    """Seconds in which a finished directory is found to be finished, without workers."""
    from comfy_tpu.cli.batch import parse_values
    from comfy_tpu.jobs.driver import Batch, ModelFacts
    from comfy_tpu.jobs.folder import Folder
    from comfy_tpu.jobs.ledger import Ledger
    from comfy_tpu.jobs.sources import open_jobs

    begun = time.monotonic()
    folder, facts = Folder(str(output)), ModelFacts("stand-in", makes_images=True)
    with contextlib.closing(Ledger(folder.ledger_path)) as ledger, open_jobs(str(jobs)) as lines:
        batch = Batch(folder, ledger, Observer(1))
        batch.submit(lines, lambda values: parse_values(values, {}), lambda request: facts)
        assert ledger.counts().open == 0
        batch.write_results()
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
