"""The ledger of a server: jobs of clients, which go on in the next process, in a fair order."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import queue
import re
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.ledger import (
    Counts,
    Job,
    Ledger,
    NewJob,
    OutputFile,
    State,
)
from comfy_tpu.jobs.request import Request
from comfy_tpu.json_input import parse_json

_TABLE = """
CREATE TABLE IF NOT EXISTS served (
    id TEXT PRIMARY KEY,
    client TEXT NOT NULL,
    key TEXT,
    body TEXT NOT NULL,
    kind TEXT NOT NULL,
    created_at REAL NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS served_by_key ON served (client, key);
CREATE INDEX IF NOT EXISTS served_by_owner ON served (client, kind, id);
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (run, state, finished_at);
CREATE TABLE IF NOT EXISTS removed (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
_COLUMNS = {
    "estimate": ("REAL", None),
    "rows": ("INTEGER NOT NULL DEFAULT 1", None),
    "input_bytes": ("INTEGER NOT NULL DEFAULT 0", None),
    "output_bytes": (
        "INTEGER NOT NULL DEFAULT 0",
        "SELECT coalesce(sum(json_extract(value, '$.size')), 0) FROM jobs, json_each(jobs.outputs)"
        " WHERE jobs.id = served.id",
    ),
}
"""Columns of `served` that servers before did not have: the type, and what old rows get."""
_TURNS = """
WITH busy AS (
    SELECT client, count(*) AS count FROM jobs CROSS JOIN served ON served.id = jobs.id
    WHERE run = 1 AND state IN ('leased', 'running') GROUP BY client
), turns AS MATERIALIZED (
    SELECT jobs.id, line, model_key, shape_key, rows, estimate,
        row_number() OVER (PARTITION BY served.client ORDER BY line) + coalesce(busy.count, 0) AS turn
    FROM jobs CROSS JOIN served ON served.id = jobs.id LEFT JOIN busy ON busy.client = served.client
    WHERE run = 1 AND state = 'submitted'
)
"""
"""The jobs that wait, by turn: that of a client's first one is the number of its jobs at work and one, and so on."""
_AHEAD = "(turn, line) < (SELECT turn, line FROM turns WHERE id = ?)"
_BYTES_INDEX = "CREATE INDEX IF NOT EXISTS served_by_bytes ON served (client, output_bytes)"

Kind = Literal["image", "video", "stage"]
OVER: tuple[State, ...] = ("done", "failed", "cancelled")


def owners_path(ledger: Path) -> Path:
    """The file with the owners of finished jobs, which outlives the ledger."""
    return ledger.with_name("owners.jsonl")


def read_owners(ledger: Path) -> dict[str, str]:
    """Clients by the ids of their jobs."""
    owners = dict[str, str]()
    with contextlib.suppress(FileNotFoundError), owners_path(ledger).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError):  # the last one of a server that was killed
                id_, client = parse_json(line)
                owners[str(id_)] = str(client)
    return owners


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
    rows: int = 1
    """Jobs of its shape that share a step."""
    input_bytes: int = 0
    """Of the files that the client sent for it."""


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


@dataclasses.dataclass(frozen=True)
class FinishedJob:
    """A job that its files tell of."""

    id: str
    kind: Kind
    client: str
    request: Request
    outputs: tuple[OutputFile, ...]
    finished_at: float


class QueueFullError(ComfyTpuError):
    """As many jobs wait as the server takes."""


class KeyUsedError(ComfyTpuError):
    """An idempotency key was given with another order before."""


class ServedLedger(Ledger):
    """Servers that share a directory, at once or one after the other, share its jobs."""

    damage_advice = "start the server again: it puts the ledger aside, and finds finished jobs by their files"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with contextlib.ExitStack() as undo:
            undo.callback(super().close)
            self._check()
            self._prepare()
            self._owners = owners_path(path)
            self._complete_owners()
            undo.pop_all()
        # Those who look wait neither for those who write (WAL) nor for each other: with one connection, a poll waited
        # for the slowest query before it.
        self._readers = queue.SimpleQueue[sqlite3.Connection]()
        self._is_closed = False

    def _check(self) -> None:
        """Raises DamagedLedgerError for damage anywhere in the file: a query would meet it some day, and answer 503
        from then on."""
        with self._errors():
            ((found,),) = self._database.execute("PRAGMA quick_check(1)").fetchall()
        if found != "ok":
            raise self._damage(f"is damaged ({found})", found)

    def _prepare(self) -> None:
        with self._write():
            for statement in filter(str.strip, _TABLE.split(";")):
                self._database.execute(statement)
            columns = [row[1] for row in self._database.execute("PRAGMA table_info(served)")]
            for name, (kind, value) in _COLUMNS.items():
                if name not in columns:
                    self._database.execute(f"ALTER TABLE served ADD COLUMN {name} {kind}")
                    if value is not None:
                        self._database.execute(f"UPDATE served SET {name} = ({value})")
            self._database.execute(_BYTES_INDEX)
            # One run for ever: what waited when a server ended is carried out by the next.
            self._database.execute("UPDATE drivers SET run = 1 WHERE token = ?", (self.token,))
        self.run = 1

    def _complete_owners(self) -> None:
        """Adds the jobs of servers that did not write owners, or could not."""
        with self._errors():
            query = "SELECT id, client FROM served JOIN jobs USING (id) WHERE state = 'done' AND client != ''"
            rows = self._database.execute(query).fetchall()
        known = read_owners(self.path) if rows else {}
        missing = [f"{json.dumps(row)}\n" for row in rows if row[0] not in known]
        if missing:
            self._write_owners(["\n", *missing])  # the last line of a server that was killed may have no end

    def _write_owners(self, lines: Iterable[str]) -> None:
        """Files do not say whose they are. Lines are never removed: a million of them have 60 MB."""
        with contextlib.suppress(OSError), self._owners.open("a") as file:
            file.writelines(lines)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._readers.get_nowait().close()
        super().close()

    @property
    def is_empty(self) -> bool:
        return not self._read("SELECT 1 FROM jobs LIMIT 1")

    def adopt(self, jobs: Iterable[FinishedJob]) -> int:
        """Records finished jobs in a ledger that has no jobs; how many it took."""
        with self._write():
            if not self.is_empty:  # another server of the directory did it
                return 0
            count = 0
            for count, job in enumerate(jobs, 1):
                self._submit(NewJob(job.id, count, job.request, job.outputs[0].name), None)
                self._database.execute(
                    "INSERT INTO served (id, client, body, kind, created_at) VALUES (?, ?, '', ?, ?)",
                    (job.id, job.client, job.kind, _moment(job.id) / 1000),
                )
                self._finish(job.id, job.outputs, {})
                self._database.execute("UPDATE jobs SET finished_at = ? WHERE id = ?", (job.finished_at, job.id))
        return count

    def _finish(self, id_: str, outputs: Sequence[OutputFile], seconds: Mapping[str, float]) -> None:
        super()._finish(id_, outputs, seconds)
        size = sum(each.size for each in outputs)
        self._database.execute("UPDATE served SET output_bytes = ? WHERE id = ?", (size, id_))

    def finish(self, id_: str, outputs: Sequence[OutputFile], seconds: Mapping[str, float]) -> bool:
        is_ours = super().finish(id_, outputs, seconds)
        for (client,) in self._read("SELECT client FROM served WHERE id = ? AND client != ''", (id_,)):
            self._write_owners([f"{json.dumps([id_, client])}\n"])
        return is_ours

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._borrow_reader() as reader, self._errors():
            return reader.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _borrow_reader(self) -> Iterator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile: there are as many as threads read at once."""
        try:
            reader = self._readers.get_nowait()
        except queue.Empty:
            with self._errors():
                reader = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
                reader.execute("PRAGMA query_only = ON")
        try:
            yield reader
        finally:
            if self._is_closed:
                reader.close()
            else:
                self._readers.put(reader)

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
            self.check_queue(order.client, queue_limit=queue_limit, client_share=client_share)
            now = time.time()
            (line,) = self._database.execute("SELECT coalesce(max(line), 0) + 1 FROM jobs").fetchone()
            self._submit(dataclasses.replace(job, line=line), None)
            self._database.execute(
                "INSERT INTO served (id, client, key, body, kind, created_at, estimate, rows, input_bytes)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(job.id, order.client, order.key, order.body, order.kind, now),
                    *(order.estimate, order.rows, order.input_bytes),
                ),
            )
        return job.id

    def check_queue(self, client: str, *, queue_limit: int, client_share: int | None = None) -> None:
        """Raises QueueFullError where `accept` would."""
        waiting = self.waiting_count()
        if waiting >= queue_limit and (
            client_share is None or self.waiting_count(client) >= min(client_share, queue_limit)
        ):
            raise QueueFullError(f"{waiting} jobs wait already; try again later")

    def is_key_used(self, client: str, key: str) -> bool:
        return bool(self._read("SELECT 1 FROM served WHERE client = ? AND key = ?", (client, key)))

    def input_bytes(self) -> dict[str, int]:
        """Bytes of the files that clients sent for jobs that are not over, by client."""
        query = (
            "SELECT client, sum(input_bytes) FROM jobs CROSS JOIN served ON served.id = jobs.id"
            " WHERE run = 1 AND state IN ('submitted', 'leased', 'running') GROUP BY client"
        )
        return dict(self._read(query))

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
        with self._lock, self._errors():
            self._database.execute("PRAGMA synchronous = FULL")
            try:
                yield
            finally:
                self._database.execute("PRAGMA synchronous = NORMAL")

    def lease_fairly(self, count: int, *, model_key: str | None = None, shape_key: str | None = None) -> list[Job]:
        """Up to `count` jobs of one shape, and no more than share a step: that of the client who has the fewest at
        work, and of the one who came first among those. Others of this shape go with it, also in that order.
        `model_key`: goes before all others. `shape_key`: preferred among equals."""
        with self._write():
            ordered = self._database.execute(
                f"{_TURNS} SELECT id, shape_key, rows FROM turns ORDER BY model_key != ?, turn, shape_key != ?, line",
                (model_key or "", shape_key or ""),
            ).fetchall()
            chosen = [id_ for id_, shape, _ in ordered if shape == ordered[0][1]]
            chosen = chosen[: min(count, ordered[0][2])] if ordered else []
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
            # Its worker may write its file after this, which only the next server removes if this one is killed.
            unfinished = "SELECT id FROM jobs WHERE id = ? AND state != 'done'"
            self._database.execute(f"INSERT OR IGNORE INTO removed {unfinished}", (id_,))
            for table in ("jobs", "served", "names"):
                self._database.execute(f"DELETE FROM {table} WHERE id = ?", (id_,))

    def was_removed(self, id_: str) -> bool:
        """Whether the job was removed before it was done."""
        return bool(self._read("SELECT 1 FROM removed WHERE id = ?", (id_,)))

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
        if client is not None:  # from the few that wait to their clients, and not the other way round
            query = (
                "SELECT count(*) FROM jobs CROSS JOIN served ON served.id = jobs.id"
                " WHERE run = 1 AND state = 'submitted' AND client = ?"
            )
        ((waiting,),) = self._read(query, () if client is None else (client,))
        return int(waiting)

    def counts(self) -> Counts:
        return Counts(**dict(self._read("SELECT state, count(*) FROM jobs WHERE run = 1 GROUP BY state")))

    def position(self, id_: str) -> int:
        """How many jobs that wait have their turn before this one. Those of the model that is loaded may overtake it
        for a while."""
        ((ahead,),) = self._read(f"{_TURNS} SELECT count(*) FROM turns WHERE {_AHEAD}", (id_,))
        return int(ahead)

    def seconds_ahead(self, id_: str, usual_seconds: float) -> float:
        """Estimated seconds of work before this job begins: all of what waits and has its turn before it, and half of
        what is at work. `usual_seconds`: of a job without an estimate."""
        ((waiting, at_work),) = self._read(
            f"{_TURNS} SELECT (SELECT sum(coalesce(estimate, ?)) FROM turns WHERE {_AHEAD}), ("
            "SELECT sum(coalesce(estimate, ?)) FROM jobs CROSS JOIN served ON served.id = jobs.id"
            " WHERE run = 1 AND state IN ('leased', 'running') AND jobs.id != ?)",
            (usual_seconds, id_, usual_seconds, id_),
        )
        return float((waiting or 0.0) + 0.5 * (at_work or 0.0))

    def finished_before(self, moment: float) -> list[Record]:
        """Jobs that were over by then, the oldest first."""
        where = (
            # A job to be tried again has a time, too.
            "run = 1 AND state IN ('done', 'failed', 'cancelled') AND finished_at < ?"
        )
        return list(self._records(where, (moment,), None, limit=1000, newest_first=False))

    def finished_beyond(self, most: int) -> list[str]:
        """The jobs whose files are to go, so that all files together, with those that clients sent, have `most` bytes:
        the oldest of the clients with the most bytes."""
        used = collections.Counter[str](self.input_bytes())
        used.update(dict(self._read("SELECT client, sum(output_bytes) FROM served GROUP BY client")))
        beyond = list[str]()
        for client, excess in _shares_beyond(used, most).items():
            query = (
                "SELECT jobs.id, output_bytes FROM served JOIN jobs ON jobs.id = served.id"
                " WHERE client = ? AND output_bytes > 0 ORDER BY finished_at LIMIT 1000"
            )
            for id_, size in self._read(query, (client,)):
                if excess <= 0:
                    break
                beyond.append(id_)
                excess -= size
        return beyond


def _shares_beyond(used: Mapping[str, int], most: int) -> dict[str, int]:
    """How much each client has beyond an equal share of `most`, where what some do not need is the others'."""
    left, share = most, 0
    ordered = sorted(used.values())
    for number, each in enumerate(ordered):
        share = left // (len(ordered) - number)
        if each > share:
            break
        left -= each
    else:
        return {}
    return {client: each - share for client, each in used.items() if each > share}
