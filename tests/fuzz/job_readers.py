"""Readers of jobs, ledgers, workflows, keys, and of what servers answer."""

from __future__ import annotations

import contextlib
import functools
import io
import sqlite3
import types
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st

from comfy_tpu.cli.batch import parse_values
from comfy_tpu.comfyui_api.workflow import read_workflow
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.jobs.folder import Folder
from comfy_tpu.jobs.ledger import Ledger, NewJob
from comfy_tpu.jobs.request import Request
from comfy_tpu.jobs.served_ledger import ServedLedger
from comfy_tpu.jobs.sources import InvalidLine, open_jobs
from comfy_tpu.parallel.host_link import Peer
from comfy_tpu.remote.client import ServerClient
from comfy_tpu.remote.keys import find_key, parse_address
from tests.fuzz.cases import check_sentence
from tests.fuzz.hostile_bytes import changed_value, documents, dump, files, leaves, small_texts
from tests.fuzz.model_readers import write
from tests.fuzz.reader import Case, named, reader

LINE = {
    "prompt": "a red circle",
    "seed": 1,
    "height": 64,
    "num-frames": 17,
    "lora": ["x.safetensors:0.5"],
    "fast": True,
}


def _job_files() -> st.SearchStrategy[Case]:
    names = st.sampled_from(
        (*LINE, "width", "image", "output", "model", "strength", "reuse", "json", "mesh", "context")
    )
    objects = st.one_of(
        changed_value(LINE), st.dictionaries(names, leaves, max_size=3).map(lambda more: {**LINE, **more})
    )
    lines = st.lists(objects.map(dump), min_size=1, max_size=3).map(b"\n".join)
    csv = b'prompt,seed,height\n"a, red ""circle""",1,64\n"two\nlines",2,64\n'
    jobs = named("jobs.jsonl", st.one_of(lines, lines, files(dump(LINE) + b"\n")))
    tables = named("jobs.csv", files(csv, b'prompt\n"', b"\xef\xbb\xbfprompt\nx", b"prompt," + b"x" * 140_000))
    return st.one_of(jobs, jobs, tables, named("jobs.txt", files(b"a red circle\n\na blue one\r\n")))


@reader("jobs.sources", "jobs.request", "cli.batch", cases=_job_files)
def read_jobs(directory: Path, _: Any, case: Case) -> None:
    """Each line is a request, or is refused for itself."""
    with open_jobs(str(write(directory, case))) as lines:
        for line in lines:
            if isinstance(line, InvalidLine):
                continue
            try:
                request = parse_values(line.values, {})
            except ComfyTpuError as error:
                check_sentence(str(error))
                continue
            request.identity("ab12", lambda name: "cd34")
            assert Request.from_json(request.to_json()).identity("ab12", str) == request.identity("ab12", str)


def _make_ledger(directory: Path, kind: type[Ledger]) -> bytes:
    path = directory / "good" / "ledger.sqlite"
    path.parent.mkdir()
    with contextlib.closing(kind(path)) as ledger:
        ledger.submit([NewJob(f"id{number}", number, Request(LINE), f"{number}.mp4") for number in range(3)], None)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("PRAGMA journal_mode = DELETE")
    return path.read_bytes()


@functools.cache
def _good_ledger(kind: type[Ledger]) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        return _make_ledger(Path(directory), kind)


def _remove_ledger(directory: Path) -> None:
    for path in directory.glob("ledger.sqlite*"):
        path.unlink()


@reader("jobs.ledger", cases=lambda: named("ledger.sqlite", files(_good_ledger(Ledger))), share=0.5)
def read_ledger(directory: Path, _: Any, case: Case) -> None:
    try:
        with contextlib.closing(Ledger(write(directory, case))) as ledger:
            ledger.counts()
            list(ledger.results())
            ledger.submit([NewJob("new", 9, Request(LINE), "9.mp4")], None)
            ledger.lease(4)
    finally:
        _remove_ledger(directory)


@reader("jobs.served_ledger", cases=lambda: named("ledger.sqlite", files(_good_ledger(ServedLedger))), share=0.5)
def read_served_ledger(directory: Path, _: Any, case: Case) -> None:
    try:
        with contextlib.closing(ServedLedger(write(directory, case))) as ledger:
            ledger.counts()
            for job in ledger.lease_fairly(4):
                assert job.request.prompt
    finally:
        _remove_ledger(directory)


RESULT = {
    "line": 1,
    "id": "ab",
    "state": "done",
    "output": "x.mp4",
    "request": LINE,
    "seconds": {"total": 1.0},
    "outputs": [{"name": "x.mp4", "sha256": "ab", "size": 1}],
}


class Silent:
    """An observer of a batch."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@reader("jobs.driver", "jobs.folder", cases=lambda: named("results.jsonl", documents(RESULT)), share=0.5)
def read_results(directory: Path, _: Any, case: Case) -> None:
    """Of a batch whose ledger is gone."""
    from comfy_tpu.jobs.driver import Batch

    write(directory, case)
    try:
        with contextlib.closing(Ledger(directory / "ledger.sqlite")) as ledger:
            Batch(Folder(str(directory)), ledger, Silent()).restore()
            ledger.counts()
            list(ledger.results())
    finally:
        _remove_ledger(directory)


WORKFLOW = {
    "1": {"class_type": "Wan21TextEncoder", "inputs": {"prompt": "x", "model_id": "demo"}},
    "2": {"class_type": "Wan21TPUSampler", "inputs": {"prompt_embeds": ["1", 0], "seed": 1}},
}
SAVED_WORKFLOW = {
    "nodes": [{"id": 1, "type": "Wan21TextEncoder", "widgets_values": ["x"]}],
    "links": [],
    "version": 0.4,
}


@reader(
    "comfyui_api.workflow",
    cases=lambda: named(
        "workflow.json",
        st.one_of(documents(WORKFLOW, {"prompt": WORKFLOW}, SAVED_WORKFLOW), files(b"\x89PNG\r\n\x1a\n" * 9)),
    ),
)
def read_api_workflow(directory: Path, _: Any, case: Case) -> None:
    assert read_workflow(write(directory, case))


@reader(
    "remote.keys",
    cases=lambda: named(
        "server-keys", files(b"https://tpu.example.org=abc\n# x\nhttp://[::1]:80=d\n", b"\xff\xfe=\n", b"a=b")
    ),
)
def read_server_keys(directory: Path, _: Any, case: Case) -> None:
    find_key(parse_address("https://tpu.example.org"), {}, write(directory, case))


@reader("remote.keys", cases=lambda: named("address", small_texts.map(lambda text: text.encode("utf-8", "replace"))))
def read_server_address(directory: Path, _: Any, case: Case) -> None:
    text = case.content.decode("utf-8", "replace")
    for written in (text, f"http://{text}", f"https://host:{text}/", f"http://host/{text}"):
        with contextlib.suppress(ComfyTpuError):
            assert str(parse_address(written))


class Answer(io.BytesIO):
    """An answer over HTTP."""

    status, reason, length = 200, "OK", None
    headers: ClassVar[dict[str, str]] = {}


def _answers(*seeds: Any) -> st.SearchStrategy[Case]:
    return named("answer", documents(*seeds))


@reader(
    "remote.client", cases=lambda: _answers({"id": "x", "state": "done", "error": {"message": "no", "param": "seed"}})
)
def read_remote_answer(directory: Path, _: Any, case: Case) -> None:
    client = ServerClient(parse_address("http://127.0.0.1:9"), None)
    for status in (200, 400, 401, 404, 503):
        answer = Answer(case.content)
        answer.status = status
        with contextlib.suppress(ComfyTpuError):
            client._check_status(answer)  # type: ignore[arg-type]
            client._read_json(client._read(answer, 2**20, lambda: None))  # type: ignore[arg-type]


COMFYUI_ANSWERS = (
    {"prompt_id": "x", "number": 1, "node_errors": {}},
    {"error": {"type": "x", "message": "m", "details": "d"}, "node_errors": {"1": {"errors": [{"message": "m"}]}}},
    {"queue_running": [[1, "x", {}, {}]], "queue_pending": [[2, "y", {}, {}]]},
    {"x": {"outputs": {"1": {"images": [{"filename": "a.png", "subfolder": "", "type": "output"}]}}, "status": {}}},
)


@reader("comfyui_api.client", cases=lambda: _answers(*COMFYUI_ANSWERS))
def read_comfyui_answer(directory: Path, _: Any, case: Case) -> None:
    from comfy_tpu.comfyui_api.client import Client

    client = Client("http://127.0.0.1:9")
    client._open = lambda path, body: Answer(case.content)  # type: ignore[method-assign]
    for look in (
        lambda: client.submit(WORKFLOW, "me"),
        lambda: client.place_in_queue("x"),
        lambda: client.finished("x", WORKFLOW),
        lambda: client.activity(),
    ):
        with contextlib.suppress(ComfyTpuError):
            look()


@reader(
    "parallel.host_link",
    cases=lambda: named("message", documents({"kind": "value", "value": 1}, ["x", 1]).map(lambda c: c + b"\n")),
)
def read_host_message(directory: Path, _: Any, case: Case) -> None:
    """Between processes of one run."""
    peer = Peer.__new__(Peer)
    peer.connection = types.SimpleNamespace(settimeout=lambda seconds: None)  # type: ignore[assignment]
    peer._reader = io.BufferedReader(io.BytesIO(case.content))  # type: ignore[arg-type]
    message = peer.receive()
    assert message is None or isinstance(message, dict)
