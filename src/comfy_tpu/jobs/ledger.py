"""The ledger: every job of a batch and its state, in SQLite.

States: submitted → leased → running → done, or failed, or cancelled. A driver leases jobs and must renew its leases;
those of a driver that is gone are submitted again. Several drivers of one
host may work on one ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.jobs.driver_lock import DriverLock, is_alive
from comfy_tpu.jobs.request import Request

VERSION = 1
LEASE_SECONDS = 60.0
"""A driver that has not renewed its leases for this long is gone."""
ATTEMPTS_MAX = 3
"""A job that has failed this often is set aside."""
LOSSES_MAX = 10
"""A job whose worker has died this often is set aside: it may be what kills them."""

State = Literal["submitted", "leased", "running", "done", "failed", "cancelled"]

_SCHEMA = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    run INTEGER NOT NULL,
    line INTEGER NOT NULL,
    request TEXT NOT NULL,
    output TEXT NOT NULL,
    model_key TEXT NOT NULL,
    shape_key TEXT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    losses INTEGER NOT NULL DEFAULT 0,
    driver TEXT,
    worker TEXT,
    error TEXT,
    seconds TEXT,
    outputs TEXT,
    submitted_at REAL NOT NULL,
    finished_at REAL
) WITHOUT ROWID;
CREATE INDEX jobs_by_group ON jobs (run, state, model_key, shape_key, line);
CREATE INDEX jobs_by_shape ON jobs (run, state, shape_key, line);
CREATE INDEX jobs_by_output ON jobs (output);
CREATE INDEX jobs_by_driver ON jobs (driver);
CREATE TABLE drivers (token TEXT PRIMARY KEY, run INTEGER NOT NULL, host TEXT NOT NULL, seen_at REAL NOT NULL);
"""
_NAMES = "CREATE TABLE IF NOT EXISTS names (name TEXT, id TEXT, PRIMARY KEY (name, id)) WITHOUT ROWID"
"""Of files beside a job's output."""


@dataclasses.dataclass(frozen=True)
class NewJob:
    id: str
    line: int
    request: Request
    output: str
    other_names: tuple[str, ...] = ()
    """Of its files, where `output` is not the only one."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A leased job."""

    id: str
    request: Request
    output: str
    attempt: int
    """From 1."""
    line: int = 0
    """Its line in the job file."""


@dataclasses.dataclass(frozen=True)
class OutputFile:
    """A file of a finished job."""

    name: str
    """Inside the batch's directory."""
    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class Counts:
    submitted: int = 0
    leased: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def total(self) -> int:
        """The jobs that are wanted."""
        return self.submitted + self.leased + self.running + self.done + self.failed

    @property
    def open(self) -> int:
        return self.submitted + self.leased + self.running


@dataclasses.dataclass(frozen=True)
class Conflict:
    """A file that another wanted job writes, too."""

    name: str
    line: int
    """That of the other job."""


@dataclasses.dataclass(frozen=True)
class Submission:
    """What became of a submitted job."""

    outcome: Literal["new", "known", "done", "again"]
    """again: it had failed, or its output is gone."""
    conflict: Conflict | None = None
    """The job was not submitted."""


class Ledger:
    damage_advice: ClassVar = "remove it: finished jobs are found again by results.jsonl"
    """What to do about a damaged file."""

    def __init__(self, path: Path) -> None:
        """Opens the ledger, or makes it, as a new driver of it. Jobs of drivers that are gone are submitted again."""
        self.path = path
        self.token = secrets.token_hex(8)
        self._lock = threading.RLock()
        with contextlib.ExitStack() as undo, self._errors():
            self._driver_lock = DriverLock(path, self.token)
            undo.callback(self._driver_lock.release)
            # Before SQLite opens it: WAL keeps its index in memory that hosts do not share, also on a network disk.
            if (host := self._driver_lock.find_other_host(path, LEASE_SECONDS)) is not None:
                raise LedgerError(
                    f"the ledger {path} is open on the host {host}, and SQLite's log works on one host at a time; end "
                    f"that process (one that was killed counts for {LEASE_SECONDS:.0f} s), or choose another directory",
                    "open on another host",
                )
            self._database = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            undo.callback(self._database.close)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            with self._transaction():
                self._make_tables()
                self._remove_gone_drivers()
                self.run = self._join()
            undo.pop_all()

    def close(self) -> None:
        """Gives unfinished jobs back."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error), self._transaction():
                self._give_back(self.token)
                self._database.execute("DELETE FROM drivers WHERE token = ?", (self.token,))
            self._database.close()
            self._driver_lock.release()

    def _make_tables(self) -> None:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise InvalidValueError(
                f"{self.path} is a ledger of version {version}, written by a newer comfy-tpu; this one reads version "
                f"{VERSION}: update it, or choose another directory"
            )
        if version == 0:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                self._database.execute(statement)
            self._database.execute(f"PRAGMA user_version = {VERSION}")
        # In ledgers of before, too, which versions without it can still read.
        self._database.execute(_NAMES)

    def _join(self) -> int:
        """The number of this run: that of another driver that is at work, else a new one."""
        row = self._database.execute("SELECT max(run) FROM drivers").fetchone()
        if row[0] is None:
            row = self._database.execute("SELECT coalesce(max(run), 0) + 1 FROM jobs").fetchone()
        values = (self.token, row[0], os.uname().nodename, time.time())
        self._database.execute("INSERT INTO drivers (token, run, host, seen_at) VALUES (?, ?, ?, ?)", values)
        return int(row[0])

    def renew(self) -> None:
        """Renews the leases of this driver, and ends those of drivers that are gone."""
        self._driver_lock.renew()
        with self._write():
            self._database.execute("UPDATE drivers SET seen_at = ? WHERE token = ?", (time.time(), self.token))
            self._remove_gone_drivers()

    def _remove_gone_drivers(self) -> None:
        drivers = self._database.execute("SELECT token, host, seen_at FROM drivers WHERE token != ?", (self.token,))
        for token, host, seen_at in drivers.fetchall():
            if not is_alive(self.path, token, host, seen_at, LEASE_SECONDS):
                self._give_back(token, lost=True)
                self._database.execute("DELETE FROM drivers WHERE token = ?", (token,))

    def submit(self, jobs: Iterable[NewJob], existing: set[str] | None = None) -> list[Submission]:
        """Adds jobs to this run. `existing`: names of the outputs that are there; None: all that are done are."""
        with self._write():
            return [self._submit(job, existing) for job in jobs]

    def _submit(self, job: NewJob, existing: set[str] | None) -> Submission:
        execute = self._database.execute
        for name in (job.output, *job.other_names):
            if (line := self._claim(name, job.id)) is not None:
                return Submission("known", conflict=Conflict(name, line))
        for name in job.other_names:
            execute("INSERT OR IGNORE INTO names (name, id) VALUES (?, ?)", (name, job.id))
        row = execute("SELECT state, run, outputs FROM jobs WHERE id = ?", (job.id,)).fetchone()
        if row is None:
            execute(
                "INSERT INTO jobs (id, run, line, request, output, model_key, shape_key, state, submitted_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 'submitted', ?)",
                (
                    *(job.id, self.run, job.line, job.request.to_json(), job.output),
                    *(job.request.model_key, job.request.shape_key, time.time()),
                ),
            )
            return Submission("new")
        state, run, outputs = row
        if run != self.run:
            execute(
                "UPDATE jobs SET run = ?, line = ?, request = ?, model_key = ?, shape_key = ? WHERE id = ?",
                (self.run, job.line, job.request.to_json(), job.request.model_key, job.request.shape_key, job.id),
            )
        if state == "done" and (existing is None or all(each["name"] in existing for each in self._parse(outputs))):
            return Submission("done")
        if state == "done" or (state in ("failed", "cancelled") and run != self.run):
            execute(
                "UPDATE jobs SET state = 'submitted', attempts = 0, losses = 0, error = NULL, driver = NULL"
                " WHERE id = ?",
                (job.id,),
            )
            return Submission("again")
        return Submission("known")

    def _claim(self, name: str, id_: str) -> int | None:
        """The line of another job of this run that writes a file of this name. Those of earlier runs are cancelled."""
        execute = self._database.execute
        # By the few ids of that name, and +run so that no index of all jobs of a run is taken instead: each line read
        # them all, and a finished batch of 10,000 was resumed in 103 s.
        named = "SELECT id FROM jobs WHERE output = ? UNION SELECT id FROM names WHERE name = ?"
        where = f"id IN ({named}) AND id != ? AND state != 'cancelled'"
        other = execute(f"SELECT line FROM jobs WHERE {where} AND +run = ?", (name, name, id_, self.run)).fetchone()
        if other is not None:
            return int(other[0])
        reason = "another request has its output's name now"
        execute(f"UPDATE jobs SET state = 'cancelled', error = ? WHERE {where}", (reason, name, name, id_))
        return None

    def restore_done(self, job: NewJob, outputs: Sequence[OutputFile], seconds: Mapping[str, float]) -> None:
        """Records a job that was done with a ledger that is lost."""
        with self._write():
            if self._submit(job, None).outcome != "done":
                self._finish(job.id, outputs, seconds)

    def lease(self, count: int, *, model_key: str | None = None, shape_key: str | None = None) -> list[Job]:
        """Up to `count` submitted jobs of one shape: of this shape if there are any, else of this model, else the
        first."""
        with self._write():
            shape = self._choose_shape(model_key, shape_key)
            if shape is None:
                return []
            rows = self._database.execute(
                "SELECT id, request, output, attempts, line FROM jobs"
                " WHERE run = ? AND state = 'submitted' AND shape_key = ? ORDER BY line LIMIT ?",
                (self.run, shape, count),
            ).fetchall()
            self._database.executemany(
                "UPDATE jobs SET state = 'leased', driver = ? WHERE id = ?", [(self.token, row[0]) for row in rows]
            )
        return [Job(row[0], Request(self._parse(row[1])), row[2], row[3] + 1, row[4]) for row in rows]

    def _choose_shape(self, model_key: str | None, shape_key: str | None) -> str | None:
        waiting = "SELECT shape_key FROM jobs WHERE run = ? AND state = 'submitted'"
        for condition, order, value in (
            ("AND shape_key = ?", "", shape_key),
            ("AND model_key = ?", "ORDER BY shape_key", model_key),
            ("", "ORDER BY model_key, shape_key", ""),
        ):
            if value is None:
                continue
            given = (self.run, value) if condition else (self.run,)
            if row := self._database.execute(f"{waiting} {condition} {order} LIMIT 1", given).fetchone():
                return str(row[0])
        return None

    def start(self, ids: Sequence[str], worker: str) -> None:
        with self._write():
            self._database.executemany(
                "UPDATE jobs SET state = 'running', worker = ? WHERE id = ? AND driver = ? AND state = 'leased'",
                [(worker, each, self.token) for each in ids],
            )

    def finish(self, id_: str, outputs: Sequence[OutputFile], seconds: Mapping[str, float]) -> bool:
        """Whether the job was this driver's; otherwise it was given to another one meanwhile."""
        with self._write():
            if not self._is_ours(id_):
                return False
            self._finish(id_, outputs, seconds)
            return True

    def _finish(self, id_: str, outputs: Sequence[OutputFile], seconds: Mapping[str, float]) -> None:
        files = json.dumps([dataclasses.asdict(each) for each in outputs])
        self._database.execute(
            "UPDATE jobs SET state = 'done', driver = NULL, error = NULL, outputs = ?, seconds = ?, finished_at = ?,"
            " attempts = attempts + 1 WHERE id = ?",
            (files, json.dumps(dict(seconds)), time.time(), id_),
        )

    def fail(self, id_: str, error: str, *, is_final: bool) -> State | None:
        """The job's state: submitted again, or failed; None if it was not this driver's. `is_final`: another attempt
        would fail in the same way."""
        with self._write():
            if not self._is_ours(id_):
                return None
            (attempts,) = self._database.execute("SELECT attempts + 1 FROM jobs WHERE id = ?", (id_,)).fetchone()
            state: State = "failed" if is_final or attempts >= ATTEMPTS_MAX else "submitted"
            self._database.execute(
                "UPDATE jobs SET state = ?, driver = NULL, error = ?, attempts = ?, finished_at = ? WHERE id = ?",
                (state, error, attempts, time.time(), id_),
            )
            return state

    def fail_model(self, model_key: str, error: str) -> None:
        """Fails all submitted jobs of a model."""
        with self._write():
            self._database.execute(
                "UPDATE jobs SET state = 'failed', error = ?, finished_at = ?"
                " WHERE run = ? AND state = 'submitted' AND model_key = ?",
                (error, time.time(), self.run, model_key),
            )

    def give_back(self, ids: Sequence[str], *, lost: bool = False) -> None:
        """Submits leased jobs of this driver again. `lost`: their worker died."""
        with self._write():
            self._give_back(self.token, ids, lost=lost)

    def _give_back(self, driver: str, ids: Sequence[str] | None = None, *, lost: bool = False) -> None:
        where, chosen = "driver = ? AND state IN ('leased', 'running')", [(driver,)]
        if ids is not None:
            where, chosen = f"{where} AND id = ?", [(driver, each) for each in ids]  # type: ignore[misc]
        if lost:
            self._database.executemany(
                f"UPDATE jobs SET losses = losses + 1 WHERE state = 'running' AND {where}", chosen
            )
            self._database.executemany(
                f"UPDATE jobs SET state = 'failed', driver = NULL, error = 'its worker died {LOSSES_MAX} times',"
                f" finished_at = {time.time()} WHERE losses >= {LOSSES_MAX} AND {where}",
                chosen,
            )
        self._database.executemany(f"UPDATE jobs SET state = 'submitted', driver = NULL WHERE {where}", chosen)

    def _is_ours(self, id_: str) -> bool:
        query = "SELECT 1 FROM jobs WHERE id = ? AND driver = ? AND state IN ('leased', 'running')"
        return self._database.execute(query, (id_, self.token)).fetchone() is not None

    def find_open(self, ids: Iterable[str]) -> dict[str, bool]:
        """Of those ids that are known here, whether the job is wanted by this run and not done."""
        query = "SELECT run = ? AND state NOT IN ('done', 'cancelled') FROM jobs WHERE id = ?"
        with self._lock, self._errors():
            rows = {each: self._database.execute(query, (self.run, each)).fetchone() for each in ids}
        return {each: bool(row[0]) for each, row in rows.items() if row is not None}

    def counts(self) -> Counts:
        query = "SELECT state, count(*) FROM jobs WHERE run = ? GROUP BY state"
        with self._lock, self._errors():
            found = dict(self._database.execute(query, (self.run,)).fetchall())
        known = {field.name for field in dataclasses.fields(Counts)}
        if unknown := [state for state in found if state not in known]:
            raise DamagedLedgerError(
                f"the ledger {self.path} has jobs in the state {unknown[0]!r}; {self.damage_advice}"
            )
        return Counts(**found)

    def results(self) -> Iterator[dict[str, Any]]:
        """The jobs of this run in the order of their lines, for results.jsonl."""
        columns = "line, id, state, output, request, attempts, worker, error, seconds, outputs, finished_at"
        last = (-1, "")
        while True:  # in parts: a million jobs are not held at once, and other drivers are not kept waiting
            with self._lock, self._errors():
                rows = self._database.execute(
                    f"SELECT {columns} FROM jobs WHERE run = ? AND state != 'cancelled' AND (line, id) > (?, ?)"
                    " ORDER BY line, id LIMIT 10000",
                    (self.run, *last),
                ).fetchall()
            if not rows:
                return
            last = rows[-1][:2]
            for row in rows:
                named = dict(zip(columns.split(", "), row, strict=True))
                for name in ("request", "seconds", "outputs"):
                    named[name] = self._parse(named[name]) if named[name] else None
                yield named

    def _parse(self, text: Any) -> Any:
        """A value that this ledger holds as JSON."""
        try:
            return json.loads(text)
        except (TypeError, ValueError) as error:
            raise self._damage("holds a job that is no JSON") from error

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # of a text in a damaged file, also of one in SQLite's message
            raise self._damage("cannot be used (it holds text that is not UTF-8)") from error
        except sqlite3.Error as error:
            text = str(error)
            if "full" in text or "disk I/O" in text:
                advice = "free some space and start again: what is done stays done"
            elif "not a database" in text or "malformed" in text:
                raise self._damage(f"cannot be used ({text})", text) from error
            else:
                advice = "look at the rights of its directory"
            raise LedgerError(f"the ledger {self.path} cannot be used ({text}); {advice}", text) from error

    def _damage(self, what: str, reason: str = "damaged") -> DamagedLedgerError:
        return DamagedLedgerError(f"the ledger {self.path} {what}; {self.damage_advice}", reason)

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        with self._lock, self._errors(), self._transaction():
            yield

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite has ended it, where the disk is full
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


class LedgerError(ComfyTpuError):
    """The ledger cannot be read or written."""

    def __init__(self, message: str, reason: str = "") -> None:
        """`reason`: in SQLite's words, without paths."""
        super().__init__(message)
        self.reason = reason or "an error"


class DamagedLedgerError(LedgerError):
    """The ledger's file is damaged, or no ledger."""
