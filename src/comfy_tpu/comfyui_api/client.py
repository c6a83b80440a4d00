"""Requests to a ComfyUI server, with errors that say what the server said. Nothing here waits or writes files."""

from __future__ import annotations

import dataclasses
import http.client
import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from comfy_tpu.comfyui_api.workflow import Workflow
from comfy_tpu.errors import ComfyTpuError, InvalidValueError, join_names
from comfy_tpu.json_input import parse_json

REQUEST_SECONDS = 30.0
"""A busy server answers late: its threads share one interpreter."""
_JSON_BYTES_MAX = 256 * 2**20
_CHUNK_BYTES = 2**20


class ServerError(ComfyTpuError):
    """The server cannot be reached, or is no ComfyUI."""


class RefusedError(ComfyTpuError):
    """The server's validation refuses the workflow."""


class FailedError(ComfyTpuError):
    """The workflow was begun and did not come to its end."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A file that a node of the workflow lists among its outputs, by its name on the server."""

    node: str
    filename: str
    subfolder: str
    type: str

    def __str__(self) -> str:
        return "/".join(filter(None, (self.type, self.subfolder, self.filename)))


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a workflow left behind."""

    files: tuple[Result, ...]
    texts: Mapping[str, list[str]]
    """By node."""


class Client:
    """`url` is the address of the server, without a path: "http://127.0.0.1:8188"."""

    def __init__(self, url: str, *, request_seconds: float = REQUEST_SECONDS) -> None:
        self.url = _checked_url(url)
        self._seconds = request_seconds
        host = urllib.parse.urlsplit(self.url).hostname or ""
        handlers = [urllib.request.ProxyHandler({})] if _is_loopback(host) else []  # a proxy knows another loopback
        self._opener = urllib.request.build_opener(*handlers)

    def submit(self, workflow: Workflow, client_id: str) -> str:
        """The id that the server gives the run. Raises RefusedError where any node is refused."""
        answer = self._ask("/prompt", {"prompt": workflow, "client_id": client_id}, refusals=True)
        errors = answer.get("node_errors")
        if answer.get("error") or errors:
            if isinstance(answer.get("prompt_id"), str):  # it would run without the nodes that are refused
                self._ask("/queue", {"delete": [answer["prompt_id"]]}, is_json=False)
            raise RefusedError(f"ComfyUI refuses the workflow: {_refusals(answer, workflow)}")
        if not isinstance(answer.get("prompt_id"), str):
            raise self._not_comfyui("it gives no prompt_id")
        return str(answer["prompt_id"])

    def place_in_queue(self, prompt_id: str) -> int | None:
        """0: it runs; else how many are before it, the running one included; None: it is not there."""
        queue = self._ask("/queue")
        running, pending = (queue.get(name) for name in ("queue_running", "queue_pending"))
        if not isinstance(running, list) or not isinstance(pending, list):
            raise self._not_comfyui("its queue has no lists")
        if prompt_id in [_item_id(item) for item in running]:
            return 0
        waiting = sorted((item for item in pending if _item_id(item) is not None), key=lambda item: item[0])
        ids = [_item_id(item) for item in waiting]
        return len(running) + ids.index(prompt_id) if prompt_id in ids else None

    def finished(self, prompt_id: str, workflow: Workflow) -> Finished | None:
        """None while it is not done. Raises FailedError where a node failed, or the run was interrupted."""
        entry = self._ask(f"/history/{urllib.parse.quote(prompt_id, safe='')}").get(prompt_id)
        if not isinstance(entry, dict):
            return None
        given = entry.get("status")
        status: dict[str, Any] = given if isinstance(given, dict) else {}
        for message in _as_list(status.get("messages")):
            kind, details = message if isinstance(message, list) and len(message) == 2 else (None, None)
            if kind in ("execution_error", "execution_interrupted") and isinstance(details, dict):
                raise FailedError(_failure(kind, details, workflow))
        if status.get("status_str") == "error":
            raise FailedError("the workflow failed, and ComfyUI does not say where; its log does")
        outputs = entry.get("outputs")
        return _collect(outputs if isinstance(outputs, dict) else {})

    def activity(self) -> str | None:
        """What our nodes are doing, where the server has them."""
        try:
            activity = self._ask("/comfy_tpu/status").get("activity")
        except ServerError:
            return None
        if not isinstance(activity, dict) or activity.get("stage") in (None, "idle"):
            return None
        done, total = activity.get("done"), activity.get("total")
        counted = f"{done}/{total}" if isinstance(total, int) and total > 1 and activity["stage"] != "loading" else ""
        return " ".join(filter(None, (str(activity["stage"]), str(activity.get("what") or ""), counted)))

    def read(self, result: Result) -> Iterator[bytes]:
        """The content of a file, piece by piece. Raises ServerError where it ends early."""
        query = urllib.parse.urlencode(
            {"filename": result.filename, "subfolder": result.subfolder, "type": result.type}
        )
        path = f"/view?{query}"
        with self._open(path, None) as reply:
            if reply.status != 200:
                raise ServerError(f"the server does not give {result} ({reply.status} {reply.reason}); look at its log")
            expected, got = reply.headers.get("Content-Length"), 0
            while piece := self._guarded(lambda: reply.read(_CHUNK_BYTES)):
                got += len(piece)
                yield piece
            if expected is not None and expected.isdigit() and got != int(expected):
                raise ServerError(f"{self.url} was lost: of {result}, {got:,} of {int(expected):,} bytes came")

    def _ask(self, path: str, body: Any = None, *, refusals: bool = False, is_json: bool = True) -> dict[str, Any]:
        """The JSON object of a reply. `refusals`: also one with status 400, which says why."""
        with self._open(path, None if body is None else json.dumps(body).encode()) as reply:
            content: bytes = self._guarded(lambda: reply.read(_JSON_BYTES_MAX))
            if not is_json:
                return {}
            if reply.status != 200 and not (refusals and reply.status == 400):
                raise self._not_comfyui(f"{path.partition('?')[0]} gives {reply.status} {reply.reason}")
        try:
            answer = parse_json(content)
        except ValueError as error:
            raise self._not_comfyui(f"its reply is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise self._not_comfyui("its reply is no object")
        return answer

    def _open(self, path: str, body: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(self.url + path, data=body, headers=headers)

        def send() -> Any:
            try:
                return self._opener.open(request, timeout=self._seconds)
            except urllib.error.HTTPError as error:
                return error  # a reply as well

        return self._guarded(send)

    def _guarded(self, action: Any) -> Any:
        try:
            return action()
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise ServerError(
                f"server={self.url} does not answer ({reason}); start ComfyUI there, or name another", field="server"
            ) from error

    def _not_comfyui(self, why: str) -> ServerError:
        return ServerError(
            f"server={self.url} does not answer as ComfyUI does ({why}); name the server itself", field="server"
        )


def _checked_url(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_usable = is_usable and not (parts.query or parts.fragment) and url.isprintable() and " " not in url
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidValueError(
            f"server={url!r} is not an address; write it as the browser shows it: http://127.0.0.1:8188", field="server"
        )
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _item_id(item: Any) -> Any:
    return item[1] if isinstance(item, list) and len(item) > 1 and isinstance(item[0], (int, float)) else None


def _as_list(value: Any) -> list[Any]:
    """A list that a server gives; empty for anything else."""
    return value if isinstance(value, list) else []


def _named(node: object, workflow: Workflow) -> str:
    kind = workflow.get(str(node), {}).get("class_type")
    return f"node {node} ({kind})" if kind else f"node {node}"


def _refusals(answer: Mapping[str, Any], workflow: Workflow) -> str:
    errors = answer.get("node_errors")
    sentences = [
        f"{_named(node, workflow)}: {_sentence(each)}"
        for node, found in (errors.items() if isinstance(errors, dict) else ())
        for each in _as_list(found.get("errors") if isinstance(found, dict) else None)
    ]
    return join_names(sentences, separator="; ") if sentences else _sentence(answer.get("error"))


def _sentence(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    return ": ".join(str(error[name]) for name in ("message", "details") if error.get(name))


def _failure(kind: str, details: Mapping[str, Any], workflow: Workflow) -> str:
    where = _named(details.get("node_id"), workflow)
    if kind == "execution_interrupted":
        return f"the workflow was cancelled at {where}; run it again"
    reason = " ".join(str(details.get("exception_message") or "no message").split())
    return f"{where} failed: {details.get('exception_type') or 'error'}: {reason}"


def _collect(outputs: Mapping[str, Any]) -> Finished:
    files: dict[Result, None] = {}
    texts: dict[str, list[str]] = {}
    for node, shown in outputs.items():
        for name, values in shown.items() if isinstance(shown, dict) else ():
            for value in values if isinstance(values, list) else ():
                if isinstance(value, dict) and isinstance(value.get("filename"), str):
                    place = (str(value.get("subfolder") or ""), str(value.get("type") or "output"))
                    files[Result(str(node), value["filename"], *place)] = None
                elif name == "text" and isinstance(value, str):
                    texts.setdefault(str(node), []).append(value)
    return Finished(tuple(files), texts)
