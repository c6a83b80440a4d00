"""Starts batches with Ray workers in processes of their own, and finds all that belong to one."""

import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = Path(__file__).parents[2] / "src"


class BatchProcess:
    """`comfy-tpu batch` in a session of its own. What it starts is found by a mark in its environment."""

    def __init__(self, jobs, output, *flags, script=HERE / "ray_stand_in_batch.py", arguments=(), **environment):
        self.mark = f"COMFY_TPU_TEST_MARK={secrets.token_hex(8)}"
        name, value = self.mark.split("=")
        command = [sys.executable, *([script] if script else ["-m", "comfy_tpu.cli", "batch"])]
        inherited = {key: given for key, given in os.environ.items() if key not in ("XLA_FLAGS", "RAY_ADDRESS")}
        self.process = subprocess.Popen(
            [*map(str, command), str(jobs), "-o", str(output), *flags],
            env={**inherited, "PYTHONPATH": f"{SOURCE}:{HERE}", name: value, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, timeout=900):
        """The exit status, standard output and standard error."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        return self.process.returncode, output, errors

    def processes(self):
        return find_processes(self.mark)

    def actors(self):
        return [process for process in self.processes() if command_line(process).startswith(b"ray::JobActor")]

    def kill(self):
        self.process.kill()
        self.process.communicate()

    def end(self):
        """Kills everything; for a test that fails."""
        for process in self.processes():
            kill(process)
        self.process.communicate()


def find_processes(mark):
    """Those that inherited the mark and are not dead."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                if mark.encode() in (place / "environ").read_bytes() and command_line(int(place.name)):
                    found.append(int(place.name))
            except OSError:
                continue
    return found


def command_line(process):
    """Empty for a process that is gone, or dead and not waited for."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(process, number=signal.SIGKILL):
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True


def write_jobs(path, count, **values):
    lines = [{"prompt": f"job {n}", "seed": n, "output": f"{n}.png", **values} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_states(output):
    """The number of jobs by state, after a check of the whole ledger."""
    with closing(sqlite3.connect(output / ".comfy-tpu" / "ledger.sqlite3")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return dict(database.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())


def read_attempts(output):
    with closing(sqlite3.connect(output / ".comfy-tpu" / "ledger.sqlite3")) as database:
        return [row[0] for row in database.execute("SELECT attempts FROM jobs").fetchall()]


def read_results(output):
    return [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
