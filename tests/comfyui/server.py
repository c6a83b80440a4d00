"""The real ComfyUI server, in a process of its own, with a base directory of its own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.comfyui.checkout import ROOT, Checkout

PACK = "ComfyUI-TPU"
PACKS = Path(__file__).parent / "packs"
PROGRAMS = ROOT / "build" / "test-programs"
START_SECONDS = 180.0
_READY = re.compile(r"To see the GUI go to")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TAIL = 60

# Set by tests/conftest.py for meshes of eight devices and for two workers; a server has what the machine has.
_NOT_INHERITED = ("XLA_FLAGS", "OMP_NUM_THREADS", "COMFYUI_PATH", "PYTHONWARNINGS")


class ComfyServer:
    """`main.py --cpu` on loopback. Its log is a file, and lines of it can be waited for."""

    def __init__(
        self,
        checkout: Checkout,
        base: Path,
        packs: Sequence[Path] = (),
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        pack: Path | None = ROOT,
    ) -> None:
        self.checkout = checkout
        self.base = base
        self.home = base.parent / f"{base.name}-home"
        self.log = base.parent / f"{base.name}.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._packs = {**({PACK: pack} if pack else {}), **{path.name: path for path in packs}}
        self._arguments = arguments
        self._more_environment = dict(environment or {})
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._closed = False

    def __enter__(self) -> Self:
        for folder in ("custom_nodes", "models", "input", "output", "user", "temp"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        self.home.mkdir(exist_ok=True)
        for name, target in self._packs.items():
            (self.base / "custom_nodes" / name).symlink_to(target, target_is_directory=True)
        self.process = subprocess.Popen(
            self._command(),
            cwd=self.base,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="comfyui-log", daemon=True)
        self._reader.start()
        try:
            self.wait_for_line(_READY, START_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def lines(self) -> list[str]:
        with self._changed:
            return list(self._lines)

    def tail(self) -> str:
        """For messages of failures."""
        state = "running" if self.alive else f"ended with status {self.process.returncode}"
        return f"ComfyUI is {state}; the end of {self.log}:\n" + "\n".join(self.lines[-_TAIL:])

    def wait_for_line(self, pattern: re.Pattern[str], seconds: float) -> str:
        """The first line that matches. Fails at once when the process has ended."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = next((line for line in self._lines if pattern.search(line)), None)
                if found is not None:
                    return found
                if self._closed or not self._changed.wait(deadline - time.monotonic()):
                    break
        raise AssertionError(f"no line {pattern.pattern!r} within {seconds:g} s; {self.tail()}")

    def resident_bytes(self) -> int:
        """Host memory of the server's process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def _command(self) -> list[str]:
        return [
            str(self.checkout.python),
            str(self.checkout.path / "main.py"),
            "--cpu",
            *("--listen", "127.0.0.1"),
            *("--port", str(self.port)),
            *("--base-directory", str(self.base)),
            # The default is in the checkout, not in the base directory.
            *("--database-url", f"sqlite:///{self.base / 'user' / 'comfyui.db'}"),
            "--disable-api-nodes",
            "--disable-auto-launch",
            *self._arguments,
        ]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        return {
            **kept,
            # A home of its own shows what is written there, and keeps the user's settings out of the tests.
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS)),
            **self._more_environment,
        }

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("w", encoding="utf-8") as file:
            for line in self.process.stdout:
                file.write(line)
                file.flush()
                with self._changed:
                    self._lines.append(_COLOURS.sub("", line).rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _stop(self) -> None:
        """The whole process group: a node may have started ffmpeg."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            try:
                self.process.wait(15)
                break
            except subprocess.TimeoutExpired:
                continue
        self._reader.join(15)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def running(
    checkout: Checkout,
    base: Path,
    packs: Sequence[str | Path] = (),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    pack: Path | None = ROOT,
) -> Iterator[ComfyServer]:
    """A server with our pack and further ones: a name is one of tests/comfyui/packs, a path is any directory.

    Without `pack`, custom_nodes of the base directory holds ours already.
    """
    paths = [PACKS / name if isinstance(name, str) else name for name in packs]
    with ComfyServer(checkout, base, paths, arguments, environment, pack) as server:
        yield server


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
