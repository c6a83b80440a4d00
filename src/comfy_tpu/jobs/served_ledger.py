"""The ledger of a server: jobs of clients, which go on in the next process, in a fair order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.ledger import Counts, Job, Ledger, NewJob, OutputFile, State, ledger_errors
from comfy_tpu.jobs.request import Request

_TABLE = """
CREATE TABLE IF NOT EXISTS served (
    id TEXT PRIMARY KEY,
    client TEXT NOT NULL,
    key TEXT,
    body TEXT NOT NULL,
    kind TEXT NOT NULL,
    created_at REAL NOT NULL,
    estimate REAL
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS served_by_key ON served (client, key);
CREATE INDEX IF NOT EXISTS served_by_owner ON served (client, kind, id);
"""

Kind = Literal["image", "video", "stage"]
OVER: tuple[State, ...] = ("done", "failed", "cancelled")


def _moment(id_: str | None) -> int:
    """The milliseconds in an id; -1 without one, and for one that a damaged ledger has."""
    digits = (id_ or "").partition("_")[2][:12]
    return int(digits, 16) if re.fullmatch("[0-9a-f]{12}", digits) else -1


@dataclasses.dataclass(frozen=True)
class Order:
    """What a client asks for."""

    client: str
    kind: Kind
    key: str | None
    """Its idempotency key: two orders of a client with one key are one job."""
    body: str
    """A digest of everything that the client said, to tell another order with the same key."""
    estimate: float | None = None
    """Seconds that it will take; None: unknown."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A job as its client may see it."""

    id: str
    kind: Kind
    state: State
    request: Request
    created_at: float
    finished_at: float | None
    error: str
    outputs: tuple[OutputFile, ...]
    seconds: dict[str, float]
    estimate: float | None
    """Seconds that it would take, as they were estimated when it was accepted."""


class QueueFullError(ComfyTpuError):
    """As many jobs wait as the server takes."""


class KeyUsedError(ComfyTpuError):
    """An idempotency key was given with another order before."""


class ServedLedger(Ledger):
    """Servers that share a directory, at once or one after the other, share its jobs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self._write():
            for statement in filter(str.strip, _TABLE.split(";")):
                self._database.execute(statement)
            columns = [row[1] for row in self._database.execute("PRAGMA table_info(served)")]
            if "estimate" not in columns:  # of a server before there were any
                self._database.execute("ALTER TABLE served ADD COLUMN estimate REAL")
            # One run for ever: what waited when a server ended is carried out by the next.
            self._database.execute("UPDATE drivers SET run = 1 WHERE token = ?", (self.token,))
        self.run = 1
        # Those who look do not wait for those who write (WAL): with one connection, a poll waited for every lease and
        # every order before it.
        self._reading = threading.Lock()
        self._reader = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
        self._reader.execute("PRAGMA query_only = ON")

    def close(self) -> None:
        with self._reading:
            self._reader.close()
        super().close()

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._reading, ledger_errors(self.path):
            return self._reader.execute(query, values).fetchall()

    def find_order(self, order: Order) -> str | None:
        """The id of the job that the client ordered with the same key. Raises KeyUsedError where that was another
        order."""
        if order.key is None:
            return None
        query = "SELECT id, body FROM served WHERE client = ? AND key = ?"
        for id_, body in self._read(query, (order.client, order.key)):
            if body != order.body:
                raise KeyUsedError("this idempotency key was used with another request; choose a new one")
            return str(id_)
        return None

    def accept(self, job: NewJob, order: Order, *, queue_limit: int, client_share: int | None = None) -> str:
        """The id of the order's job, which is in the ledger when this returns: a new one, or the one that the client
        ordered with the same key. `client_share`: jobs of one client that may wait however full the queue is; None:
        as many as may of all clients."""
        with self._durable(), self._write():
            if (known := self.find_order(order)) is not None:
                return known
            waiting = self.waiting_count()
            if waiting >= queue_limit and (
                client_share is None or self.waiting_count(order.client) >= min(client_share, queue_limit)
            ):
                raise QueueFullError(f"{waiting} jobs wait already; try again later")
            now = time.time()
            (line,) = self._database.execute("SELECT coalesce(max(line), 0) + 1 FROM jobs").fetchone()
            self._submit(dataclasses.replace(job, line=line), None)
            self._database.execute(
                "INSERT INTO served (id, client, key, body, kind, created_at, estimate) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (job.id, order.client, order.key, order.body, order.kind, now, order.estimate),
            )
        return job.id

    def new_id(self, kind: Kind) -> str:
        """An id that is larger than those before it, also where the clock was set back: a list that is ordered by ids
        goes on behind one that was deleted meanwhile."""
        last = self._read("SELECT max(id) FROM served WHERE id > ? AND id < ?", (f"{kind}_", f"{kind}`"))[0][0]
        moment = max(int(time.time() * 1000), _moment(last) + 1)
        return f"{kind}_{moment:012x}{secrets.token_hex(6)}"

    @contextlib.contextmanager
    def _durable(self) -> Iterator[None]:
        """What is written meanwhile outlives a loss of power, too. A commit takes 0.2 ms with it, 2.5 ms on a busy
        disk, and 0.01 ms without: only orders, which somebody is told of, are worth it."""
        with self._lock, ledger_errors(self.path):
            self._database.execute("PRAGMA synchronous = FULL")
            try:
                yield
            finally:
                self._database.execute("PRAGMA synchronous = NORMAL")

    def lease_fairly(self, count: int, *, shape_key: str | None = None) -> list[Job]:
        """Up to `count` jobs of one shape: that of the client who has the fewest at work, and of the one who came first
        among those. Others of this shape go with it, also in that order. `shape_key`: preferred among equals."""
        # A client's first waiting job has the number of its jobs at work, the next one more, and so on.
        ranked = """
            SELECT jobs.id, jobs.line, jobs.shape_key,
                row_number() OVER (PARTITION BY served.client ORDER BY jobs.line) + (
                    SELECT count(*) FROM jobs AS busy JOIN served AS theirs ON theirs.id = busy.id
                    WHERE busy.run = 1 AND busy.state IN ('leased', 'running') AND theirs.client = served.client
                ) AS turn
            FROM jobs JOIN served ON served.id = jobs.id WHERE jobs.run = 1 AND jobs.state = 'submitted'
        """
        with self._write():
            ordered = self._database.execute(
                f"SELECT id, shape_key FROM ({ranked}) ORDER BY turn, shape_key != ?, line", (shape_key or "",)
            ).fetchall()
            chosen = [id_ for id_, shape in ordered if shape == ordered[0][1]][:count]
            self._database.executemany(
                "UPDATE jobs SET state = 'leased', driver = ? WHERE id = ?", [(self.token, id_) for id_ in chosen]
            )
            # Of the chosen ones only: a thousand requests that wait may have ten megabytes.
            rows = [
                self._database.execute(
                    "SELECT id, request, output, attempts, line FROM jobs WHERE id = ?", (id_,)
                ).fetchone()
                for id_ in chosen
            ]
        return [Job(row[0], Request(self._parse(row[1])), row[2], row[3] + 1, row[4]) for row in rows]

    def held_jobs(self) -> set[str]:
        """The ids of the jobs that this server has leased; those that another one cancelled are not among them."""
        query = "SELECT id FROM jobs WHERE driver = ? AND state IN ('leased', 'running')"
        return {id_ for (id_,) in self._read(query, (self.token,))}

    def cancel(self, id_: str, reason: str) -> State | None:
        """Ends a job that is not over; the state that it was in, None where there is no such job."""
        with self._write():
            row = self._database.execute("SELECT state FROM jobs WHERE id = ?", (id_,)).fetchone()
            if row is not None and row[0] in ("submitted", "leased", "running"):
                self._database.execute(
                    "UPDATE jobs SET state = 'cancelled', driver = NULL, error = ?, finished_at = ? WHERE id = ?",
                    (reason, time.time(), id_),
                )
        return None if row is None else row[0]

    def remove(self, id_: str) -> None:
        """Forgets a job that is over, and its idempotency key."""
        with self._write():
            for table in ("jobs", "served", "names"):
                self._database.execute(f"DELETE FROM {table} WHERE id = ?", (id_,))

    def find(self, id_: str, client: str | None = None) -> Record | None:
        """A job; of this client, if one is named."""
        return next(self._records("jobs.id = ?", (id_,), client, limit=1), None)

    def list_jobs(
        self, client: str | None, kind: Kind, *, limit: int, after: str | None = None, newest_first: bool = True
    ) -> list[Record]:
        """Jobs in the order in which they came, behind the one named `after`, which need not be there any more."""
        where, values = "served.kind = ?", list[str]([kind])
        if after is not None:
            where += f" AND served.id {'<' if newest_first else '>'} ?"
            values.append(after)
        return list(self._records(where, tuple(values), client, limit=limit, newest_first=newest_first))

    def _records(
        self, where: str, values: tuple[Any, ...], client: str | None, *, limit: int, newest_first: bool = True
    ) -> Iterator[Record]:
        if client is not None:
            where, values = f"{where} AND served.client = ?", (*values, client)
        order = "DESC" if newest_first else "ASC"
        columns = "jobs.id, kind, state, request, created_at, finished_at, error, outputs, seconds, estimate"
        rows = self._read(
            f"SELECT {columns} FROM jobs JOIN served ON served.id = jobs.id WHERE {where}"
            f" ORDER BY served.id {order} LIMIT ?",
            (*values, limit),
        )
        for id_, kind, state, request, created_at, finished_at, error, outputs, seconds, estimate in rows:
            yield Record(
                id_,
                kind,
                state,
                Request.from_json(request),
                created_at,
                finished_at,
                error or "",
                tuple(OutputFile(**each) for each in json.loads(outputs or "[]")),
                json.loads(seconds or "{}"),
                estimate,
            )

    def waiting_count(self, client: str | None = None) -> int:
        """Jobs that wait: of this client, if one is named."""
        query = "SELECT count(*) FROM jobs WHERE run = 1 AND state = 'submitted'"
        if client is not None:
            query += " AND id IN (SELECT id FROM served WHERE client = ?)"
        ((waiting,),) = self._read(query, () if client is None else (client,))
        return int(waiting)

    def counts(self) -> Counts:
        return Counts(**dict(self._read("SELECT state, count(*) FROM jobs WHERE run = 1 GROUP BY state")))

    def position(self, id_: str) -> int:
        """How many jobs were accepted before this one and wait, too."""
        ((ahead,),) = self._read(
            "SELECT count(*) FROM jobs WHERE run = 1 AND state = 'submitted'"
            " AND line < (SELECT line FROM jobs WHERE id = ?)",
            (id_,),
        )
        return int(ahead)

    def seconds_ahead(self, id_: str, usual_seconds: float) -> float:
        """Estimated seconds of work before this job begins: all of what came before it and waits, and half of what is
        at work. `usual_seconds`: of a job without an estimate."""
        ((seconds,),) = self._read(
            "SELECT coalesce(sum(coalesce(estimate, ?) * CASE jobs.state WHEN 'submitted' THEN 1 ELSE 0.5 END), 0)"
            " FROM jobs JOIN served ON served.id = jobs.id"
            " WHERE run = 1 AND state IN ('submitted', 'leased', 'running') AND jobs.id != ?"
            " AND line < (SELECT line FROM jobs WHERE id = ?)",
            (usual_seconds, id_, id_),
        )
        return float(seconds)

    def finished_before(self, moment: float) -> list[Record]:
        """Jobs that were over by then, the oldest first."""
        where = (
            "state IN ('done', 'failed', 'cancelled') AND finished_at < ?"  # a job to be tried again has a time, too
        )
        return list(self._records(where, (moment,), None, limit=1000, newest_first=False))

    def finished_bytes(self) -> list[tuple[str, int]]:
        """The jobs with files, newest first, and the bytes of each."""
        rows = self._read("SELECT id, outputs FROM jobs WHERE run = 1 AND state = 'done' ORDER BY finished_at DESC")
        return [(id_, sum(each["size"] for each in json.loads(outputs))) for id_, outputs in rows]
