"""JAX's coordination service in a process of its own, so that it outlives the first process for some seconds.

In the first process it would go with it, and JAX's client in every other process answers that by abort(), with a stack
trace. The callback that jaxlib takes instead cannot be a Python function (0.10.2: std::bad_cast). Meanwhile the others
learn of the end from their own connection, and end with a sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

LINGER_SECONDS = 4
"""How long the service, and with it the port, outlives a first process that was ended."""

# Waits for the end of its input, which comes however the first process ends.
_SERVICE = f"""
import json, os, sys, time
from jaxlib import _jax
address, count, options = json.loads(sys.argv[1])
service = _jax.get_distributed_runtime_service(address, count, **options)
sys.stdout.write("ready\\n")
sys.stdout.flush()
time.sleep(0.5 if sys.stdin.read() else {LINGER_SECONDS})
os._exit(0)
"""


class ServiceProcess:
    """The service as `jax.distributed` knows it."""

    def __init__(self, address: str, count: int, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVICE, json.dumps([address, count, options])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # or Ctrl-C in a terminal would end it first
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"its service could not be started at {address}")

    def shutdown(self) -> None:
        """Ends the service after all clients have left it."""
        with contextlib.suppress(OSError):
            self._process.communicate(b"done")


@contextlib.contextmanager
def separate_service() -> Iterator[None]:
    """Lets `jax.distributed.initialize` start the service as a process, and its client leave without waiting."""
    import jax._src.distributed

    distributed: Any = jax._src.distributed
    library = distributed._jax

    class Library:
        get_distributed_runtime_service = ServiceProcess

        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def get_distributed_runtime_client(self, *arguments: Any, **options: Any) -> Any:
            return library.get_distributed_runtime_client(*arguments, **options, shutdown_on_destruction=False)

    distributed._jax = Library()
    try:
        yield
    finally:
        distributed._jax = library


def delay_abort() -> None:
    """Lets abort() in this process wait for 6 seconds, in which a sentence can still be printed.

    Where the first process and the service end together, as in a container. The handler is libc's `sleep`, which gets
    the number of the signal, 6, for its argument. A handler that is there already, such as faulthandler's, stays.
    """
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    if before is not None:  # SIG_DFL is 0
        libc.signal(signal.SIGABRT, before)
