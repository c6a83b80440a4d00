"""Jobs a second of a server: from 8 clients, from one client that waits for each, and of `comfy-tpu batch`.

    python -m benchmarks.serve.throughput --count 96 --json benchmarks/serve/throughput-two-cores.json

Two comparisons with the demo model. Images (videos of one frame) of one shape from 8 clients, and from one client that
orders the next when it has the one before: requests that wait together share steps. And videos that all wait at once,
in a server and in `comfy-tpu batch`. Everything is warm: the first group of a batch is not counted, and a server has
made such jobs before. `--rounds`: each with servers of its own; medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.serve.http_client import HttpClient
from benchmarks.serve.server_process import serving

IMAGE: dict[str, Any] = {"width": 64, "height": 64, "num_frames": 1, "num_inference_steps": 8}
VIDEO: dict[str, Any] = {"width": 64, "height": 64, "num_frames": 17, "num_inference_steps": 8}


async def order_and_wait(client: HttpClient, job: dict[str, Any], poll_seconds: float) -> None:
    answer = (await client.request("POST", "/v1/videos", job)).json()
    while answer["status"] not in ("completed", "failed"):
        await asyncio.sleep(poll_seconds)
        answer = (await client.request("GET", f"/v1/videos/{answer['id']}")).json()
    if answer["status"] == "failed":
        raise SystemExit(f"a job failed: {answer['error']}")


async def run_clients(port: int, shape: dict[str, Any], *, clients: int, count: int) -> float:
    """Jobs a second. Each client has one job at a time."""
    numbers = iter(range(count))

    async def run() -> None:
        client = HttpClient(port)
        for number in numbers:
            await order_and_wait(client, {**shape, "prompt": "a red circle", "seed": number}, 0.02)
        client.close()

    begun = time.monotonic()
    await asyncio.gather(*(run() for _ in range(clients)))
    return count / (time.monotonic() - begun)


async def run_queue(port: int, shape: dict[str, Any], *, count: int, first: int) -> float:
    """Jobs a second from the end of the first group to that of the last, where all were ordered at once."""
    client = HttpClient(port)
    bodies = [{**shape, "prompt": "a red circle", "seed": number} for number in range(count)]
    ids = [(await client.request("POST", "/v1/videos", body)).json()["id"] for body in bodies]
    ends: list[float] = []
    while len(ends) < count:  # the metrics cost the server less than a poll of each job
        await asyncio.sleep(0.02)
        lines = (await client.request("GET", "/metrics")).content.decode().splitlines()
        done = int(next(line.split()[1] for line in lines if 'finished_total{state="done"}' in line)) - first
        ends += [time.monotonic()] * (done - len(ends))
    for id_ in ids:
        await client.request("DELETE", f"/v1/videos/{id_}")
    client.close()
    return _steady_rate(ends)


def run_batch(shape: dict[str, Any], count: int, out: Path) -> float:
    """As `run_queue`, by the events of the command."""
    jobs = out / "jobs.jsonl"
    lines = [{**shape, "prompt": "a red circle", "seed": number, "output": f"{number}.mp4"} for number in range(count)]
    jobs.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "comfy_tpu.cli", "batch", str(jobs), "-o", str(out), "--json"]
    ends = []
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "done":
                ends.append(time.monotonic())
    assert process.returncode == 0
    return _steady_rate(ends)


def _steady_rate(ends: list[float]) -> float:
    first = sum(1 for end in ends if end - ends[0] < 0.1)  # of one group
    return (len(ends) - first) / (ends[-1] - ends[0])


def measure(count: int, rounds: int, root: Path) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"eight clients": [], "one by one": [], "server": [], "batch": []}
    for number in range(rounds):
        with serving(root / f"images-{number}", root / "images.log") as (port, _):
            for name, clients in (("one by one", 1), ("eight clients", 8)):
                asyncio.run(run_clients(port, IMAGE, clients=clients, count=4 * clients))  # compiles, where it must
                rates[name].append(asyncio.run(run_clients(port, IMAGE, clients=clients, count=count)))
        with serving(root / f"videos-{number}", root / "videos.log") as (port, _):
            asyncio.run(run_queue(port, VIDEO, count=16, first=0))
            rates["server"].append(asyncio.run(run_queue(port, VIDEO, count=count, first=16)))
        out = root / f"batch-{number}"
        out.mkdir()
        rates["batch"].append(run_batch(VIDEO, count, out))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    loads = os.getloadavg()
    with tempfile.TemporaryDirectory() as directory:
        rates = measure(arguments.count, arguments.rounds, Path(directory))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": [round(each, 1) for each in loads],
        "beside": arguments.note,
        "count": arguments.count,
        "jobs_per_second": {name: [round(each, 3) for each in values] for name, values in rates.items()},
        "eight_clients_times_one_by_one": round(middle["eight clients"] / middle["one by one"], 3),
        "server_times_batch": round(middle["server"] / middle["batch"], 3),
    }
    text = json.dumps(result, indent=2)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
