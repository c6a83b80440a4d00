"""A client of a ComfyUI server, as its own frontend is one: prompts over HTTP, events and images over a WebSocket."""

import asyncio
import json
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tests.comfyui.server import ComfyServer

Prompt = dict[str, dict[str, Any]]
RUN_SECONDS = 240.0
_OUTCOMES = ("execution_success", "execution_error", "execution_interrupted")
_PREVIEW, _TEXT, _PREVIEW_WITH_METADATA = 1, 3, 4  # protocol.BinaryEventTypes


@dataclass(frozen=True)
class Message:
    """One message of the socket. Binary ones are named "preview" and "text"."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


class RefusedError(Exception):
    """ComfyUI did not take the prompt: what it says of the whole, and of each node."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(json.dumps(answer, indent=1))
        self.answer = answer
        self.node_errors: dict[str, dict[str, Any]] = answer.get("node_errors") or {}

    def sentences(self, node: str) -> list[str]:
        return [f"{error['message']}: {error['details']}" for error in self.node_errors[node]["errors"]]


@dataclass
class Run:
    """One prompt, and what came over the socket for it, in order."""

    id: str
    messages: list[Message] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message.data for message in self.messages if message.kind == kind]

    @property
    def outcome(self) -> str | None:
        return next((message.kind for message in self.messages if message.kind in _OUTCOMES), None)

    @property
    def finished(self) -> bool:
        """The last message of a prompt; the history has it by then."""
        return any(data.get("node", "") is None for data in self.of("executing"))

    @property
    def error(self) -> dict[str, Any]:
        return self.of("execution_error")[0]

    @property
    def cached(self) -> set[str]:
        return set(self.of("execution_cached")[0]["nodes"])

    @property
    def executed(self) -> list[str]:
        """The nodes that ran, in order."""
        return [data["node"] for data in self.of("executing") if data.get("node") is not None]

    def texts(self, node: str | None = None) -> list[str]:
        return [data["text"] for data in self.of("text") if node in (None, data["node"])]

    def outputs(self, node: str) -> dict[str, Any]:
        found = [data["output"] for data in self.of("executed") if data["node"] == node]
        assert found, f"node {node} showed nothing; nodes that did: {[data['node'] for data in self.of('executed')]}"
        output: dict[str, Any] = found[-1]
        return output


class ComfyClient:
    """Synchronous. The socket is read by a thread; whoever waits for a message waits on a condition, never a clock."""

    def __init__(self, server: ComfyServer) -> None:
        self.server = server
        self.id = uuid.uuid4().hex
        self.messages: list[Message] = []
        self._runs: dict[str, Run] = {}
        self._current: Run | None = None
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._connected = threading.Event()
        self._listening: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._listen, name="comfyui-socket", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._connected.wait(30):
            raise AssertionError(f"no WebSocket within 30 s; {self.server.tail()}")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._listening is not None
        self._loop.call_soon_threadsafe(self._listening.cancel)
        self._thread.join(30)

    # HTTP

    def request(
        self,
        method: str,
        path: str,
        *,
        json_body: Any = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The reply whatever its status."""
        sent = dict(headers or {})
        if json_body is not None:
            body = json.dumps(json_body).encode()
            sent.setdefault("Content-Type", "application/json")
        request = urllib.request.Request(self.server.url + path, data=body, headers=sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return Reply(reply.status, reply.read(), dict(reply.headers))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.read(), dict(error.headers))
        except OSError as error:
            raise AssertionError(f"{method} {path}: {error}; {self.server.tail()}") from error

    def get(self, path: str) -> Any:
        return self._checked("GET", path).json()

    def post(self, path: str, json_body: Any) -> Reply:
        return self._checked("POST", path, json_body=json_body)

    def object_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.get("/object_info")
        return info

    def status(self) -> dict[str, Any]:
        """Our own route."""
        status: dict[str, Any] = self.get("/comfy_tpu/status")
        return status

    def history(self, run: Run) -> dict[str, Any]:
        entry: dict[str, Any] = self.get(f"/history/{run.id}")[run.id]
        return entry

    def view(self, entry: Mapping[str, str]) -> bytes:
        """A file that a node lists in its output."""
        query = urllib.parse.urlencode({name: entry[name] for name in ("filename", "subfolder", "type")})
        return self._checked("GET", f"/view?{query}").body

    def upload(self, name: str, content: bytes, kind: str = "input") -> Reply:
        """As the frontend uploads an image."""
        boundary = uuid.uuid4().hex
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'.encode(),
            content,
            f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="type"\r\n\r\n{kind}'.encode(),
            f"\r\n--{boundary}--\r\n".encode(),
        ]
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return self._checked("POST", "/upload/image", body=b"".join(parts), headers=headers)

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    def free(self, *, unload_models: bool = True, free_memory: bool = True) -> None:
        """What the frontend's two buttons send. The server does it when it is idle: `empty_device` waits for that."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def empty_device(self, *, free_memory: bool = True, seconds: float = 60.0) -> None:
        """Free, until nothing of ours is on the device.

        Asked again after a while: a request that arrives while ComfyUI's worker collects garbage behind a prompt wakes
        nobody, and would be seen only with the next prompt (PromptQueue.set_flag notifies a worker that does not wait).
        """
        asked = 0.0

        def is_empty() -> bool:
            nonlocal asked
            if time.monotonic() - asked > 3:
                self.free(free_memory=free_memory)
                asked = time.monotonic()
            return not self.status()["resident"]

        self.eventually(is_empty, "an empty device", seconds)

    # prompts

    def queue(self, prompt: Prompt, **extra_data: Any) -> Run:
        """Raises RefusedError when ComfyUI's validation refuses any node of it."""
        run = Run(str(uuid.uuid4()))  # with hyphens: newer servers take no other form
        with self._changed:
            self._runs[run.id] = run
        body = {"prompt": prompt, "client_id": self.id, "prompt_id": run.id, "extra_data": extra_data}
        reply = self.request("POST", "/prompt", json_body=body)
        answer = reply.json()
        if reply.status != 200 or answer["node_errors"]:
            raise RefusedError(answer)
        assert answer["prompt_id"] == run.id, answer
        return run

    def run(self, prompt: Prompt, *, seconds: float = RUN_SECONDS, **extra_data: Any) -> Run:
        """Queues it and waits for the end, good or bad."""
        return self.wait(self.queue(prompt, **extra_data), lambda run: run.finished, "the end", seconds)

    def succeed(self, prompt: Prompt, *, seconds: float = RUN_SECONDS, **extra_data: Any) -> Run:
        run = self.run(prompt, seconds=seconds, **extra_data)
        assert run.outcome == "execution_success", f"{run.outcome}: {run.of('execution_error')}\n{self.server.tail()}"
        return run

    def fail(self, prompt: Prompt, *, seconds: float = RUN_SECONDS, **extra_data: Any) -> dict[str, Any]:
        """Of a prompt that ends with an error on a node: that error."""
        run = self.run(prompt, seconds=seconds, **extra_data)
        assert run.outcome == "execution_error", f"{run.outcome}\n{self.server.tail()}"
        return run.error

    def wait(self, run: Run, until: Callable[[Run], bool], what: str, seconds: float = RUN_SECONDS) -> Run:
        """Looks again at every message of the run. Fails at once when the server or the socket has ended."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not until(run):
                if not self._thread.is_alive() or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            else:
                return run
        last = run.messages[-3:]
        raise AssertionError(f"waited {seconds:g} s for {what}; last messages: {last}; {self.server.tail()}")

    def finish(self, run: Run, seconds: float = RUN_SECONDS) -> Run:
        return self.wait(run, lambda run: run.finished, "the end", seconds)

    def eventually(self, look: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """For what the server tells nobody: asks again until it is so."""
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not look():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s for {what}; {self.server.tail()}")
            pause.wait(0.05)

    def _checked(self, method: str, path: str, **arguments: Any) -> Reply:
        reply = self.request(method, path, **arguments)
        if reply.status != 200:
            raise AssertionError(f"{method} {path}: {reply.status} {reply.body[:500]!r}; {self.server.tail()}")
        return reply

    # the socket

    def _listen(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._receive())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            with self._changed:
                self._changed.notify_all()

    async def _receive(self) -> None:
        import aiohttp  # here: test modules import this one also where aiohttp is absent, and skip

        self._listening = asyncio.current_task()
        address = f"{self.server.url}/ws?clientId={self.id}"
        try:
            async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
                # With these flags previews name their node, as the frontend has them.
                await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
                async for received in socket:
                    if received.type == aiohttp.WSMsgType.TEXT:
                        content = json.loads(received.data)
                        self._add(Message(content["type"], content["data"]))
                    elif received.type == aiohttp.WSMsgType.BINARY:
                        self._add(_binary(received.data))
                    # The server answers the flags once it knows this client by its id.
                    self._connected.set()
        except asyncio.CancelledError:
            pass

    def _add(self, message: Message) -> None:
        with self._changed:
            self.messages.append(message)
            # Texts and images do not name their prompt: they belong to the one that is running.
            name = message.data.get("prompt_id")
            run = self._runs.get(name) if name else self._current
            if run is not None and message.kind != "status":
                run.messages.append(message)
                self._current = None if run.finished else run
            self._changed.notify_all()


def _binary(data: bytes) -> Message:
    (kind,) = struct.unpack(">I", data[:4])
    rest = data[4:]
    if kind == _TEXT:
        (length,) = struct.unpack(">I", rest[:4])
        node, text = rest[4 : 4 + length], rest[4 + length :]
        return Message("text", {"node": node.decode(), "text": text.decode()})
    if kind == _PREVIEW_WITH_METADATA:
        (length,) = struct.unpack(">I", rest[:4])
        metadata = json.loads(rest[4 : 4 + length])
        return Message("preview", {"node": metadata["node_id"], "image": rest[4 + length :]})
    if kind == _PREVIEW:
        return Message("preview", {"node": None, "image": rest[4:]})
    return Message(f"binary {kind}", {"bytes": rest})
