"""A connection between the first host of a run and all others: who has joined, what to do, and who has failed.

It stands beside JAX's own coordination service, on the next port. JAX ends a process whose peers are gone by abort(),
after minutes, and does not tell why; a collective of gloo waits for a dead peer for ever. Here the kernel closes the
connections of a process that ends, however it ends, and a thread in each of the others says so and ends it. Messages
are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from comfy_tpu.errors import HostsError
from comfy_tpu.terminal_text import excerpt, sanitize

Json = Any
"""What JSON can hold."""

_LINE_BYTES = 8 * 2**20
"""The longest message."""
_HELLO_SECONDS = 10
_RETRY_SECONDS = 0.3
# A machine that is gone without closing its connections is noticed after 10 + 4 * 5 seconds. The kernel answers for a
# process, so that one which compiles for minutes is not taken for dead.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}

ROOT_CAUSE_SECONDS = 5.0
"""After an error that the end of another process may have caused, the time in which that is learnt."""
SIGNAL_SECONDS = 20.0
"""The time that a process has to end by itself after Ctrl-C or SIGTERM; a collective may never return."""


class Peer:
    """One connection, on which whole messages are sent and received."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # Linux has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection = connection
        self._reader = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: dict[str, Json]) -> None:
        """Raises OSError where the other side is gone."""
        line = json.dumps(message).encode("ascii") + b"\n"
        assert len(line) <= _LINE_BYTES
        with self._sending:
            self.connection.sendall(line)

    def receive(self, seconds: float | None = None) -> dict[str, Json] | None:
        """The next message; None where the other side is gone, sends no JSON, or nothing in time."""
        try:
            self.connection.settimeout(seconds)
            line = self._reader.readline(_LINE_BYTES + 1)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a thread that waits for a message gets none
        with contextlib.suppress(OSError):
            self._reader.close()
        with contextlib.suppress(OSError):
            self.connection.close()


class HostLink:
    """The joined processes of a run, seen from one of them."""

    def __init__(self, process: int, count: int, peers: dict[int, Peer], names: dict[int, str]) -> None:
        """`peers`: all others on the first host, and the first on the others. `names`: machines by process."""
        self.process = process
        self.count = count
        self.names = names
        self._peers = peers
        self._received: dict[int, queue.SimpleQueue[Json]] = {peer: queue.SimpleQueue() for peer in peers}
        self._ending = threading.Lock()
        """Held for ever by the thread that ends this process: only it prints a sentence."""
        self._done = threading.Event()
        self._can_report = threading.Event()
        """Set once `on_end` was called: another process may fail before."""
        self._report: Callable[[str], None] = lambda sentence: None
        self._cleanups: list[Callable[[], object]] = []
        for number in peers:
            threading.Thread(target=self._watch, args=(number,), name=f"host {number}", daemon=True).start()

    @property
    def is_first(self) -> bool:
        return self.process == 0

    def on_end(self, report: Callable[[str], None], *cleanups: Callable[[], object]) -> None:
        """What is done where another process ends this one: `report` prints the sentence, `cleanups` remove files."""
        self._report, self._cleanups = report, list(cleanups)
        self._can_report.set()

    @contextlib.contextmanager
    def cleaning_up(self, cleanup: Callable[[], object]) -> Iterator[None]:
        """Has `cleanup` called, too, where another process ends this one inside the block."""
        self._cleanups.insert(0, cleanup)
        try:
            yield
        finally:
            self._cleanups.remove(cleanup)

    def broadcast(self, value: Json = None) -> Json:
        """The first host's value, in every process; what the others give is not looked at."""
        if self.is_first:
            self._send_all({"type": "value", "value": value})
            return value
        return self._received[0].get()

    def gather(self, value: Json) -> dict[int, Json]:
        """The values of all processes on the first host; on the others, only their own."""
        if not self.is_first:
            self._send(0, {"type": "value", "value": value})
            return {self.process: value}
        return {0: value} | {number: self._received[number].get() for number in sorted(self._peers)}

    def agree(self, error: str | None, fact: Json, judge: Callable[[dict[int, Json]], Json], seconds: float) -> Json:
        """What `judge` makes of the facts of all processes on the first host, in every process.

        `seconds`: where there is an `error`, the time in which the others must come here too, or all are ended.
        """
        wait = None if error is None else seconds
        try:
            if not self.is_first:
                self._send(0, {"type": "value", "value": fact})
                return self._received[0].get(timeout=wait)
            facts = {0: fact} | {number: self._received[number].get(timeout=wait) for number in sorted(self._peers)}
        except queue.Empty:
            self.end_all(f"{self.describe(self.process)} failed, and the others do not answer: {error}")
        return self.broadcast(judge(facts))

    def end_all(self, sentence: str) -> NoReturn:
        """Ends this process and all others, from any thread."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the thread that ends this process is at work
        self._tell(self.process, sentence)
        self._end(sentence)

    def finish(self) -> None:
        """Waits until all processes have come here, and closes the connections."""
        if self.is_first:
            for number in self._peers:
                self._received[number].get()
            self._done.set()
            self._send_all({"type": "done"})
        else:
            self._send(0, {"type": "done"})
            self._received[0].get()
            self._done.set()
        self.close()

    def fail(self, sentence: str, *, wait: float = 0.0) -> None:
        """Tells all others that this process ends, and why. Never returns where it ends because of another one.

        `wait`: seconds in which to learn of another process's end, which may be the reason of this one's.
        """
        time.sleep(0 if self._ending.locked() else wait)
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the thread that ends this process is at work
        self._tell(self.process, sentence)
        self._done.set()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    @contextlib.contextmanager
    def watching_signals(self) -> Iterator[None]:
        """Ends all processes some time after a signal to this one, even where its main thread never gets to handle it.

        For the main thread only: Python lets no other one do it.
        """
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch_signals, args=(reader,), name="signals", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writer.close()

    def _watch_signals(self, reader: socket.socket) -> None:
        ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        with reader:
            while received := reader.recv(1):
                if received[0] in ends:
                    break
            else:
                return
        if not self._done.wait(SIGNAL_SECONDS) and self._ending.acquire(blocking=False):
            self._tell(self.process, "it was interrupted")
            self._end("interrupted")

    def _watch(self, number: int) -> None:
        """Receives the messages of one process, until one of them, or their end, ends this process."""
        peer = self._peers[number]
        while True:
            message = peer.receive()
            if self._done.is_set():
                return
            if message is None:
                failed, reason = number, ""
                break
            if message.get("type") == "failed":
                failed, reason = int(message["process"]), str(message["sentence"])
                break
            self._received[number].put(message.get("value"))
            if message.get("type") == "done" and not self.is_first:
                self._done.set()  # the first host closes its connections after this message
                return
        if not self._ending.acquire(blocking=False):
            return
        self._tell(failed, reason)
        self._end(self._explain(failed, reason))

    def describe(self, number: int) -> str:
        name = self.names.get(number)
        return f"process {number} of {self.count}" + (f" ({sanitize(excerpt(name))})" if name else "")

    def _explain(self, failed: int, reason: str) -> str:
        who = self.describe(failed)
        if reason:
            return f"{who} failed, so this one ends too: {sanitize(reason)}"
        return f"{who} has ended or cannot be reached, so this one ends too; look at its output, and start all again"

    def _tell(self, failed: int, sentence: str) -> None:
        for number in self._peers:
            if number != failed:
                with contextlib.suppress(OSError):
                    self._peers[number].send({"type": "failed", "process": failed, "sentence": sentence[:4000]})

    def _end(self, sentence: str) -> NoReturn:
        self._can_report.wait(SIGNAL_SECONDS)
        for cleanup in tuple(self._cleanups):
            with contextlib.suppress(Exception):  # the process ends in any case
                cleanup()
        with contextlib.suppress(Exception):
            self._report(sentence)
        # Not sys.exit: the main thread may wait for a dead process in a collective, for ever.
        os._exit(1)

    def _send(self, number: int, message: dict[str, Json]) -> None:
        with contextlib.suppress(OSError):  # the watching thread learns of it too, and ends this process
            self._peers[number].send(message)

    def _send_all(self, message: dict[str, Json]) -> None:
        for number in self._peers:
            self._send(number, message)


def listen(address: tuple[str, int]) -> socket.socket:
    """The socket on which the first host waits for the others; raises OSError where the port is taken."""
    try:
        return socket.create_server(address)
    except OSError as error:
        if error.errno is None or isinstance(error, socket.gaierror):
            raise
        if error.errno not in _NOT_OURS:
            raise
    # The address is another machine's name for this one, as behind a load balancer or a pod's service.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", address[1]), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", address[1]))


_NOT_OURS = (99, 49)  # EADDRNOTAVAIL on Linux and macOS


def accept_all(
    server: socket.socket, count: int, hello: dict[str, Json], seconds: float, check: Callable[[Json, Json], str | None]
) -> HostLink:
    """Waits for all other processes on the first host. `check`: (own hello, another's) -> why the other is refused."""
    peers: dict[int, Peer] = {}
    names = {0: str(hello["host"])}
    deadline = time.monotonic() + seconds
    try:
        while len(peers) < count - 1:
            watched = {server: 0, **{peer.connection: number for number, peer in peers.items()}}
            ready, _, _ = select.select(list(watched), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise HostsError(_missing(count, [0, *peers], seconds), field="hosts_timeout")
            if server not in ready:  # nobody speaks before all have joined
                raise HostsError(
                    f"process {watched[ready[0]]} of {count} ({names[watched[ready[0]]]}) ended before all had joined; "
                    "look at its output, and start all again"
                )
            connection, _ = server.accept()
            peer = Peer(connection)
            given = peer.receive(_HELLO_SECONDS)
            if given is None or given.get("type") != "hello" or not isinstance(given.get("process"), int):
                peer.close()  # somebody who knocks at every port
                continue
            number, name = given["process"], str(given.get("host"))
            refusal = check(hello, given)
            if refusal is None and (number in peers or number == 0):
                refusal = (
                    f"process_id={number} was given to two processes, on {names[number]} and {name}; give each host a "
                    "number of its own"
                )
            peers[number if number not in peers else -1 - len(peers)] = peer
            names.setdefault(number, name)
            if refusal is not None:
                raise HostsError(refusal, field="process_id" if refusal.startswith("process_id=") else None)
    except BaseException as error:
        sentence = str(error) if isinstance(error, HostsError) else "the first host was interrupted"
        for peer in peers.values():
            with contextlib.suppress(OSError):
                peer.send({"type": "failed", "process": 0, "sentence": sentence})
            peer.close()
        raise
    finally:
        server.close()
    # Before anybody is listened to: one that fails at once must not be heard of by those who are not welcome yet.
    for peer in peers.values():
        with contextlib.suppress(OSError):  # its end is noticed as that of any other
            peer.send({"type": "welcome", "names": {str(number): name for number, name in names.items()}})
    return HostLink(0, count, peers, names)


def _missing(count: int, joined: list[int], seconds: float) -> str:
    missing = [str(number) for number in range(count) if number not in joined]
    shown = ", ".join(missing[:16]) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    noun, have = ("process", "has") if len(missing) == 1 else ("processes", "have")
    return (
        f"hosts_timeout={seconds:g} seconds have passed, and {noun} {shown} of {count} {have} not joined; start the "
        "same command there with its own --process-id, or look at its error"
    )


def connect(address: tuple[str, int], process: int, count: int, hello: dict[str, Json], seconds: float) -> HostLink:
    """Joins the first host from another one."""
    deadline = time.monotonic() + seconds
    host, port = address
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(1.0, min(10.0, deadline - time.monotonic())))
            break
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise HostsError(
                    f"coordinator={host}:{port - 1} could not be reached from process {process} in {seconds:g} seconds "
                    f"({error.strerror or error}); start process 0 there, and let ports {port - 1} and {port} through",
                    field="coordinator",
                ) from None
        time.sleep(_RETRY_SECONDS)
    peer = Peer(connection)
    with contextlib.suppress(OSError):
        peer.send(hello)
    # The first host waits as long for the others, and says who is missing.
    welcome = peer.receive(seconds + 30)
    if welcome is not None and welcome.get("type") == "failed":
        peer.close()
        raise HostsError(f"process 0 refused to start: {sanitize(str(welcome.get('sentence')))}")
    if welcome is None or welcome.get("type") != "welcome":
        peer.close()
        raise HostsError(
            f"coordinator={host}:{port - 1} ended the connection before all processes had joined; look at the error of "
            "process 0 there",
            field="coordinator",
        )
    names = {int(number): str(name) for number, name in welcome["names"].items()}
    return HostLink(process, count, {0: peer}, names)
