"""Many clients of one server: answers, latencies, memory, and whether every accepted job ended exactly once.

    python -m benchmarks.serve.load --clients 200 --minutes 10 --json benchmarks/serve/load-two-cores.json

Starts `comfy-tpu serve demo`. Each client orders a video of the demo model, small and of few steps, polls it or follows
its events, lists, reads models and metrics now and then, downloads the file, and orders the next. Some cancel, some
delete, some send an order twice with one idempotency key. A full queue (429) is waited out. At the end, what the
clients were answered is compared with the ledger and with the files. Latencies are those that clients see; clients and
server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import hashlib
import json
import os
import platform
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.serve.http_client import Answer, HttpClient
from benchmarks.serve.server_process import serving

READS = ("retrieve", "list", "models", "metrics", "health", "content")
"""The kinds of calls that change nothing."""
_SIZES = ((16, 16, 1), (32, 32, 5), (64, 64, 5))
_OVER = ("completed", "failed")


@dataclasses.dataclass
class Seen:
    """What the clients saw."""

    latencies: dict[str, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    answers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    accepted: dict[str, str] = dataclasses.field(default_factory=dict)
    """The last status that was answered, by the id of a job."""
    cancelled: set[str] = dataclasses.field(default_factory=set)
    deleted: set[str] = dataclasses.field(default_factory=set)
    faults: list[str] = dataclasses.field(default_factory=list)
    lags: list[float] = dataclasses.field(default_factory=list)
    """Seconds by which the clients' own event loop was late: part of every latency."""


class Client:
    def __init__(self, port: int, number: int, seen: Seen, ends_at: float, think_seconds: float) -> None:
        self._http = HttpClient(port)
        self._events = HttpClient(port)
        self._random = random.Random(number)
        self._number, self._seen, self._ends_at, self._think = number, seen, ends_at, think_seconds

    async def run(self) -> None:
        await asyncio.sleep(self._random.uniform(0, self._think))
        try:
            while time.monotonic() < self._ends_at:
                id_ = await self._order()
                if id_ is not None:
                    await self._follow(id_)
        except (OSError, asyncio.IncompleteReadError) as error:
            self._seen.faults.append(f"client {self._number}: {type(error).__name__}: {error}")
        finally:
            self._http.close()
            self._events.close()

    async def _call(self, kind: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        begun = time.perf_counter()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self._http.request(method, path, body, fields)
        self._seen.latencies[kind].append(time.perf_counter() - begun)
        self._seen.answers[f"{kind} {answer.status}"] += 1
        if answer.status >= 500:
            self._seen.faults.append(f"{kind}: {answer.status} {answer.content[:200]!r}")
        return answer

    async def _order(self) -> str | None:
        width, height, frames = self._random.choice(_SIZES)
        body = {
            "prompt": f"a red circle of client {self._number}",
            "size": f"{width}x{height}",
            "num_frames": frames,
            "num_inference_steps": self._random.choice((1, 2, 4)),
            "seed": self._random.randrange(10**6),
        }
        key = {"Idempotency_Key": f"{self._number}-{self._random.random()}"} if self._random.random() < 0.3 else {}
        answer = await self._call("order", "POST", "/v1/videos", body, **key)
        if answer.status == 429:
            await asyncio.sleep(float(answer.headers["retry-after"]))
            return None
        if answer.status != 200:
            self._seen.faults.append(f"order: {answer.status} {answer.content[:200]!r}")
            return None
        id_ = str(answer.json()["id"])
        if id_ in self._seen.accepted:
            self._seen.faults.append(f"{id_} was answered to two orders")
        self._seen.accepted[id_] = "queued"
        if key:
            again = await self._call("order", "POST", "/v1/videos", body, **key)
            if again.status != 200 or again.json()["id"] != id_:
                self._seen.faults.append(f"a key that was sent twice: {again.status}, not {id_}")
        return id_

    async def _follow(self, id_: str) -> None:
        if self._random.random() < 0.05:
            await asyncio.sleep(self._random.uniform(0, self._think))
            self._seen.cancelled.add(id_)
            await self._call("cancel", "POST", f"/v1/videos/{id_}/cancel")
        if self._random.random() < 0.1:
            await self._events.request("GET", f"/v1/videos/{id_}/events")
            self._seen.answers["events 200"] += 1
        status = "queued"
        while status not in _OVER:
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._think)
            answer = await self._call("retrieve", "GET", f"/v1/videos/{id_}")
            if answer.status != 200:
                self._seen.faults.append(f"{id_} was accepted, and is gone: {answer.status}")
                return
            status = self._seen.accepted[id_] = answer.json()["status"]
            await self._look_around()
        if status == "completed":
            content = (await self._call("content", "GET", f"/v1/videos/{id_}/content")).content
            if content[4:8] != b"ftyp":
                self._seen.faults.append(f"{id_} has no video: {content[:40]!r}")
        if self._random.random() < 0.1:
            self._seen.deleted.add(id_)
            await self._call("delete", "DELETE", f"/v1/videos/{id_}")

    async def _look_around(self) -> None:
        chance = self._random.random()
        for share, kind, path in (
            (0.1, "list", "/v1/videos?limit=20"),
            (0.2, "models", "/v1/models"),
            (0.22, "metrics", "/metrics"),
            (0.25, "health", "/healthz"),
        ):
            if chance < share:
                await self._call(kind, "GET", path)
                return


async def run_clients(port: int, process: int, count: int, seconds: float, think: float) -> tuple[Seen, list[Any]]:
    """What they saw, and (second, bytes of memory, processor seconds) of the server."""
    seen, begun = Seen(), time.monotonic()
    clients = [Client(port, number, seen, begun + seconds, think) for number in range(count)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    memory = []
    while not all(task.done() for task in tasks):
        memory.append((round(time.monotonic() - begun, 1), _memory(process), _processor_seconds(process)))
        expected = time.monotonic() + 2.0
        await asyncio.sleep(2.0)
        seen.lags.append(time.monotonic() - expected)
        if time.monotonic() - begun > seconds + 300:
            seen.faults.append(f"{sum(not task.done() for task in tasks)} clients still wait 300 s after the end")
            for task in tasks:
                task.cancel()
            break
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen, memory


def _memory(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) * 1024


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def check_jobs(directory: Path, seen: Seen) -> dict[str, Any]:
    """Compares what clients were answered with the ledger and the files."""
    with closing(sqlite3.connect(directory / ".comfy-tpu" / "ledger.sqlite3")) as database:
        rows = database.execute("SELECT id, state, coalesce(error, ''), outputs FROM jobs").fetchall()
    found = {row[0]: row[1:] for row in rows}
    faults = [f"{id_} was accepted, and is lost" for id_ in seen.accepted if id_ not in {*found, *seen.deleted}]
    faults += [f"{id_} was made twice, or for nobody" for id_ in found if id_ not in seen.accepted]
    files = {path.name for path in directory.glob("*") if path.is_file()}
    for id_, (state, error, outputs) in found.items():
        if state not in ("done", "failed", "cancelled"):
            faults.append(f"{id_} is {state} at the end")
        if state == "failed":
            faults.append(f"{id_} failed: {error or 'without a reason'}")
        for output in json.loads(outputs or "[]") if state == "done" else ():
            path = directory / output["name"]
            files.discard(path.name)
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != output["sha256"]:
                faults.append(f"{id_} has no whole file")
    faults += [f"{name} is nobody's file" for name in sorted(files)]
    return {
        "accepted": len(seen.accepted),
        **collections.Counter(row[1] for row in rows),
        "deleted": len(seen.deleted),
        "lost_or_doubled_or_failed": faults[:50],
    }


def describe_latencies(seen: Seen) -> dict[str, dict[str, float]]:
    """Milliseconds by the kind of call; "reads": of all that change nothing."""
    kinds = {**seen.latencies, "reads": [each for kind in READS for each in seen.latencies.get(kind, ())]}
    described = {}
    for kind, seconds in kinds.items():
        if len(seconds) > 1:
            cuts = statistics.quantiles(seconds, n=100, method="inclusive")
            marks = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(seconds)}
            described[kind] = {"calls": len(seconds), **{name: round(1e3 * at, 1) for name, at in marks.items()}}
    return described


def describe_memory(memory: list[Any], seconds: float) -> dict[str, Any]:
    """From minute 3 on, or from the middle of a shorter run. By minutes: the median, what the server holds; its single
    samples have the buffers of the group that is denoised or decoded at that moment, too."""
    since = 180.0 if seconds > 240 else seconds / 2
    steady = [size for at, size, _ in memory if since <= at <= seconds]
    first, last = (statistics.mean(part) for part in (steady[:15], steady[-15:]))
    minutes: dict[int, list[int]] = collections.defaultdict(list)
    for at, size, _ in memory:
        if since <= at <= seconds:
            minutes[int((at - since) // 60)].append(size)
    medians = [statistics.median(sizes) for sizes in minutes.values() if len(sizes) > 5]
    return {
        "since_second": since,
        "first_megabytes": round(first / 1e6, 1),
        "last_megabytes": round(last / 1e6, 1),
        "growth_percent": round(100 * (last / first - 1), 2),
        "median_megabytes_by_minute": [round(size / 1e6, 1) for size in medians],
        "largest_deviation_of_a_minute_percent": round(100 * max(abs(size / medians[0] - 1) for size in medians), 2),
        "largest_deviation_of_a_sample_percent": round(100 * max(abs(size / first - 1) for size in steady), 2),
        "megabytes_by_second": [[at, round(size / 1e6, 1)] for at, size, _ in memory[::5]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--think-seconds", type=float, default=2.0, help="between two calls of a client, on average")
    parser.add_argument("--queue-limit", type=int, default=150)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--directory", type=Path, help="of the server; stays (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.directory or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        served, log = root / "served", root / "server.log"
        loads_before = os.getloadavg()
        with serving(served, log, "--queue-limit", str(arguments.queue_limit)) as (port, process):
            clients = run_clients(port, process, arguments.clients, seconds, arguments.think_seconds)
            seen, memory = asyncio.run(clients)
        jobs = check_jobs(served, seen)
    result = {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": [round(each, 1) for each in loads_before],
        "beside": arguments.note,
        "clients": arguments.clients,
        "minutes": arguments.minutes,
        "think_seconds": arguments.think_seconds,
        "answers": dict(sorted(seen.answers.items())),
        "answers_of_500_and_more": sum(n for name, n in seen.answers.items() if int(name.split()[1]) >= 500),
        "faults": seen.faults[:50],
        "jobs": jobs,
        "jobs_per_second": round(jobs.get("done", 0) / seconds, 2),
        "server_cores_used": round((memory[-1][2] - memory[0][2]) / (memory[-1][0] - memory[0][0]), 2),
        "milliseconds": describe_latencies(seen),
        "clients_lag_milliseconds_p95": round(1e3 * sorted(seen.lags)[int(0.95 * len(seen.lags))], 1),
        "memory": describe_memory(memory, seconds),
    }
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(render(result))


def render(result: dict[str, Any]) -> str:
    lines = [f"{'call':<10}{'calls':>8}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}{'max ms':>10}"]
    for kind, marks in sorted(result["milliseconds"].items()):
        lines.append(f"{kind:<10}" + f"{marks['calls']:>8}" + "".join(f"{marks[m]:>10}" for m in list(marks)[1:]))
    shown = ("answers", "answers_of_500_and_more", "faults", "jobs", "jobs_per_second", "server_cores_used")
    lines += [f"{name}: {result[name]}" for name in (*shown, "clients_lag_milliseconds_p95")]
    lines.append(f"memory: { ({k: v for k, v in result['memory'].items() if k != 'megabytes_by_second'}) }")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
